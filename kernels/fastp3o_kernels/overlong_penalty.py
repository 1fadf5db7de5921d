"""DAPO's penalty on long responses."""

from torch import Tensor


def overlong_penalty(lengths: Tensor, *, longest: int, margin: int) -> Tensor:
    """DAPO's soft punishment, to add to rewards, any shape (arXiv 2503.14476, equation 13): 0 up to longest − margin
    tokens, then falling to −1 at `longest`.

    Raises ValueError unless 0 < margin <= longest.
    """
    if not 0 < margin <= longest:
        raise ValueError(f"margin must be above 0 and at most longest ({longest}), got {margin}")
    return ((longest - margin - lengths) / margin).clamp(-1.0, 0.0)
