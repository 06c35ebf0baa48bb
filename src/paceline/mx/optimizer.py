"""MXNet's names of optimizers: classes to give to ``Trainer``, ``Module.fit`` or ``KVStore.set_optimizer``.

They are classes of ``torch.optim``. So options stand beside them, ``Trainer(net, mx.optimizer.SGD, {"lr": 0.1})``, and
not in a call of them, which needs parameters. ``SGD`` has MXNet's momentum; the name ``"sgd"`` means torch's.
"""

from torch.optim import Adadelta as AdaDelta
from torch.optim import Adagrad as AdaGrad
from torch.optim import Adam, Adamax
from torch.optim import NAdam as Nadam
from torch.optim import RMSprop as RMSProp

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


def __getattr__(name: str) -> object:
    raise AttributeError(f"paceline.mx.optimizer has no {name!r}; a name or class, and options, choose an optimizer")
