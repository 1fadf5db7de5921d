"""An artificial language with a known utility of responses, to compare algorithms at a size that
trains in seconds.

A prompt is "topic3 style1 w017 w045 w092 w003", a response is words. Topic and style colour the
choice of every word; only the last of the prompt's four words matters, as the first previous word:
the others make prompts distinct.
"""

import re

import numpy as np

TOPICS, STYLES, CONTEXT = 10, 4, 4
CLASSES, WORDS = 12, 120  # word w belongs to class w // 10
MAX_TOKENS = 32  # of a response, including its end-of-sequence
VOCABULARY = [
    *(f"topic{topic}" for topic in range(TOPICS)),
    *(f"style{style}" for style in range(STYLES)),
    *(f"w{word:03}" for word in range(WORDS)),
]

WORDS_WITHOUT_END, HAZARD = 10, 0.1
RANK = 8  # of the table of next words, so that a small model can learn it
SPREAD = 0.96  # standard deviations of a logit's three parts; a word then has 3.5 nats

FREE_LENGTH = 14
PENALTY_PER_WORD = 0.25  # beyond the free length: the best responses end before the longest
PENALTY_PER_REPEAT = 0.15

PROMPT = re.compile(rf"topic(\d) style([0-{STYLES - 1}])(?: w\d\d\d)* w(0\d\d|1[01]\d)")
# negative: they occur only in prompts
INDEX = {word: index - TOPICS - STYLES for index, word in enumerate(VOCABULARY)}


class Language:
    """The tables of one language.

    probabilities: of the next word, [topics, styles, previous words, next words].
    class_weights: the worth of a class of words in a topic, [topics, classes].
    """

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        after_word = rng.normal(size=(WORDS, RANK)) @ rng.normal(size=(RANK, WORDS)) / RANK**0.5
        on_topic = rng.normal(size=(TOPICS, 1, 1, WORDS))
        in_style = rng.normal(size=(STYLES, 1, WORDS))
        odds = np.exp(SPREAD * (after_word + on_topic + in_style))
        self.probabilities = odds / odds.sum(axis=-1, keepdims=True)
        cumulative = odds.cumsum(axis=-1)
        self.cumulative = cumulative / cumulative[..., -1:]  # the last one is exactly 1
        # Topics share half, so that a small model can begin to learn; no topic is hopeless or easy.
        weights = rng.normal(size=CLASSES) + rng.normal(size=(TOPICS, CLASSES))
        self.class_weights = (weights - weights.mean(axis=1, keepdims=True)) / weights.std(
            axis=1, keepdims=True
        )
        self.scale = 1.0
        self.scale = self.deviation_within_prompts(rng)

    def deviation_within_prompts(
        self, rng: np.random.Generator, prompts: int = 500, samples: int = 8
    ) -> float:
        """Standard deviation of the utility between responses of the language to the same prompt."""
        repeated = [prompt for prompt in self.prompts(prompts, rng) for _ in range(samples)]
        utilities = np.reshape(
            self.utility(repeated, self.responses(repeated, rng)), (prompts, samples)
        )
        return float(np.sqrt(utilities.var(axis=1, ddof=1).mean()))

    def prompts(self, n: int, rng: np.random.Generator) -> list[str]:
        """n distinct prompts."""
        kinds = (TOPICS, STYLES, *[WORDS] * CONTEXT)
        drawn = np.unravel_index(rng.choice(np.prod(kinds), size=n, replace=False), kinds)
        return [
            f"topic{topic} style{style} " + text_of(words)
            for topic, style, *words in zip(*(part.tolist() for part in drawn), strict=True)
        ]

    def responses(self, prompts: list[str], rng: np.random.Generator) -> list[str]:
        """One response to each prompt: at least 10 words, at most 31."""
        lengths = np.minimum(
            WORDS_WITHOUT_END - 1 + rng.geometric(HAZARD, len(prompts)), MAX_TOKENS - 1
        )
        words = self.continued(prompts, MAX_TOKENS - 1, rng)
        return [text_of(drawn[:length]) for drawn, length in zip(words, lengths, strict=True)]

    def continued(
        self, prompts: list[str], count: int, rng: np.random.Generator
    ) -> list[list[int]]:
        """The next `count` words after each prompt."""
        topics, styles, previous = np.array([parsed(prompt) for prompt in prompts]).T
        words = np.empty((len(prompts), count), dtype=int)
        for position in range(count):
            passed = self.cumulative[topics, styles, previous] <= rng.random((len(prompts), 1))
            words[:, position] = previous = passed.sum(axis=1)
        return words.tolist()

    def utility(self, prompts: list[str], responses: list[str]) -> list[float]:
        """The utility of each response to its prompt; 1 is a standard deviation of the language's
        own responses to a prompt, 0 is the utility of saying nothing.

        Σ_classes weight(topic, class) √count(class), less a penalty for each repeated word and for
        each word beyond the 14th. Topics and styles, which a policy may emit, have no class.

        Raises ValueError for a response with another word.
        """
        return [
            self.utility_of_words(parsed(prompt)[0], words_in(response)) / self.scale
            for prompt, response in zip(prompts, responses, strict=True)
        ]

    def utility_of_words(self, topic: int, words: list[int]) -> float:
        counts = np.bincount(
            [word * CLASSES // WORDS for word in words if word >= 0], minlength=CLASSES
        )
        repeats = len(words) - len(set(words))
        beyond = max(0, len(words) - FREE_LENGTH)
        gain = float(self.class_weights[topic] @ np.sqrt(counts))
        return gain - PENALTY_PER_REPEAT * repeats - PENALTY_PER_WORD * beyond


def parsed(prompt: str) -> tuple[int, int, int]:
    """(topic, style, last word). ValueError if it is not a prompt."""
    match = PROMPT.fullmatch(prompt)
    if match is None:
        raise ValueError(
            f"expected a prompt such as 'topic3 style1 w017 w045 w092 w003', got {prompt!r}"
        )
    topic, style, word = match.groups()
    return int(topic), int(style), int(word)


def words_in(response: str) -> list[int]:
    """Indices of the words; topics and styles are below 0."""
    try:
        return [INDEX[word] for word in response.split()]
    except KeyError as error:
        raise ValueError(
            f"expected words of the language, got {error} in the response {response!r}"
        ) from None


def text_of(words: list[int]) -> str:
    return " ".join(f"w{word:03}" for word in words)
