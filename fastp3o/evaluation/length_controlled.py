"""The win rate that two models would have if their responses were equally long (AlpacaEval 2, arXiv
2404.04475).
"""

import numpy as np

ITERATIONS = 100
TOLERANCE = 1e-10  # of the gradient of the mean log-likelihood
ROUNDING = 1e-13  # of the mean log-likelihood


class NotDeterminedError(ValueError):
    """The verdicts and lengths leave a length-controlled win rate open; the message says why."""


def length_controlled(preferred: np.ndarray, longer: np.ndarray) -> float:
    """The length-controlled win rate σ(θ): with θ and φ of the greatest likelihood, P(a response is
    preferred) = σ(θ + φ tanh(Δ / s)), where Δ is by how much it is longer and s the standard
    deviation of Δ. It is the model of Dubois et al. (arXiv 2404.04475, section 3) without the
    difficulty of prompts, which takes verdicts on many models.

    preferred: P(a response is better than the other model's), of any shape, within 0 and 1; NaN
    without a verdict. longer: Δ in characters, of the same shape. Raises NotDeterminedError without
    a verdict, if all Δ are the same, and if lengths separate wins from losses, so that no θ and φ
    are the best ones.
    """
    known = ~np.isnan(preferred)
    verdicts, lengths = preferred[known].astype(np.float64), longer[known].astype(np.float64)
    require_both(verdicts, lengths)
    terms = np.stack([np.ones_like(lengths), np.tanh(lengths / lengths.std())], axis=1)
    return float(sigmoid(fitted(terms, verdicts)[0]))


def require_both(verdicts: np.ndarray, lengths: np.ndarray) -> None:
    """Raises NotDeterminedError unless exactly one θ and φ are the best (Albert and Anderson 1984).
    [n] fp64 each; a verdict between 0 and 1 is a win and a loss.
    """
    if not len(verdicts):
        raise NotDeterminedError("no comparison has a verdict")
    won, lost = lengths[verdicts > 0], lengths[verdicts < 1]
    if not len(won) or not len(lost):
        raise NotDeterminedError(f"every comparison is {'won' if len(won) else 'lost'}")
    if lengths.min() == lengths.max():
        raise NotDeterminedError(
            "responses differ in length from the rival's by the same in all comparisons"
        )
    if lost.max() <= won.min() or won.max() <= lost.min():
        raise NotDeterminedError("the lengths of responses separate all wins from all losses")


def fitted(terms: np.ndarray, verdicts: np.ndarray) -> np.ndarray:
    """The weights [m] of the terms [n, m] at which the mean of v log p + (1 − v) log(1 − p), p =
    σ(terms · weights), is greatest: Newton's steps, halved until it falls no more. All fp64.
    """
    weights = np.zeros(terms.shape[1])
    for _ in range(ITERATIONS):
        predicted = sigmoid(terms @ weights)
        gradient = terms.T @ (verdicts - predicted) / len(verdicts)
        if np.abs(gradient).max() < TOLERANCE:
            return weights
        curvature = (terms * (predicted * (1 - predicted))[:, None]).T @ terms / len(verdicts)
        step = np.linalg.solve(curvature, gradient)
        reached = log_likelihood(terms, verdicts, weights)
        while log_likelihood(terms, verdicts, weights + step) < reached - ROUNDING:
            step = step / 2
        weights = weights + step
    raise NotDeterminedError(f"the fit has not converged after {ITERATIONS} steps")


def log_likelihood(terms: np.ndarray, verdicts: np.ndarray, weights: np.ndarray) -> float:
    logits = terms @ weights
    return float((verdicts * logits - np.logaddexp(0, logits)).mean())


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -logits))
