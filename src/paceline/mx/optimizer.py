"""MXNet's names of optimizers: classes to give to ``Trainer``, ``Module.fit`` or ``KVStore.set_optimizer``.

They are classes of ``torch.optim``. So options stand beside them, ``Trainer(net, mx.optimizer.SGD, {"lr": 0.1})``, and
not in a call of them, which needs parameters. ``SGD`` has MXNet's momentum; the name ``"sgd"`` means torch's.
"""

from typing import TYPE_CHECKING

from torch.optim import Adadelta as AdaDelta
from torch.optim import Adagrad as AdaGrad
from torch.optim import Adam, Adamax
from torch.optim import NAdam as Nadam
from torch.optim import RMSprop as RMSProp

from paceline.naming import absent
from paceline.updaters import DCASGD, LAMB, LARS, NAG, SGLD, Ftrl, MXNetSGD, Signum

__all__ = [
    "DCASGD",
    "LAMB",
    "LARS",
    "NAG",
    "SGD",
    "SGLD",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "Adamax",
    "Ftrl",
    "Nadam",
    "RMSProp",
    "Signum",
]

SGD = MXNetSGD


#: What to use for names of MXNet's that are not here.
_INSTEAD = {
    "Optimizer": "torch.optim.Optimizer",
    "Test": "KVStore.set_updater('test')",
    "Updater": "KVStore.set_optimizer",
    "create": "the name and the options themselves: Trainer(params, 'sgd', {'learning_rate': 0.1})",
    "get_updater": "KVStore.set_optimizer",
    "register": "a subclass of torch.optim.Optimizer, given as a class",
}

if not TYPE_CHECKING:  # a checker knows the names above, and no others
    __getattr__ = absent(__name__, __all__, _INSTEAD)
