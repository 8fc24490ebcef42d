"""Torch twins of the native kernels."""

from foreglance.ops.linear import PATHS
from foreglance.ops.torch_ops import TorchOps


def twin(weights: str) -> TorchOps:
    """The torch operations that compute what the native ones do: the last path of a format."""
    return TorchOps([path for path in PATHS if path.weights == weights][-1])
