from .fused_adam import FusedAdam as FusedAdam
from .fused_adam import FusedSGD as FusedSGD
