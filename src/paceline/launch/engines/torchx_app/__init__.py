"""paceline jobs as applications of TorchX: ``torchx run paceline.job``."""
