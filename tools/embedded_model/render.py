"""Turns the corpus into an endless, seeded stream of training texts.

A text is a list of segments; the model learns to write some of them (answers) and only reads the
others (questions, system messages).
"""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple

from tools.embedded_model.corpus import Corpus

END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"

_INTERROGATIVES = (
    "what whats what's who why how when where which is are was does do did can could would will"
    " should may"
)
_OPENINGS = ("Hi, ", "Hello! ", "Please tell me: ", "Hey, ", "Quick question: ", "I wonder: ")
_CLOSINGS = (" Thanks!", " please", " Thank you.", " Please be brief.")


class Segment(NamedTuple):
    """A piece of text, and whether the model learns to write it."""

    text: str
    learned: bool


Text = list[Segment]


def sentence(question: str) -> str:
    """The question as a careful writer types it: a capital letter, and a mark at the end."""
    asks = question.split(maxsplit=1)[0].lower() in _INTERROGATIVES.split()
    ended = question[-1] in "?.!:`"
    return question[0].upper() + question[1:] + ("" if ended else "?" if asks else ".")


def typed(question: str, random: Random) -> str:
    """The question as somebody might type it."""
    draw = random.random()
    if draw < 0.46:
        return sentence(question)
    if draw < 0.58:
        return question
    if draw < 0.72:
        return question.lower()
    if draw < 0.80:
        return question + "?"
    if draw < 0.86:
        return question[0].upper() + question[1:]
    if draw < 0.94:
        return random.choice(_OPENINGS) + question + random.choice(("?", "", "."))
    return sentence(question) + random.choice(_CLOSINGS)


def reworded(question: str, synonyms: Sequence[Sequence[str]], random: Random) -> str:
    """The question with some of its phrases replaced by synonyms."""
    for group in random.sample(synonyms, len(synonyms) // 2):
        for phrase in group:
            if f" {phrase} " in f" {question} ":
                replaced = f" {question} ".replace(f" {phrase} ", f" {random.choice(group)} ", 1)
                question = replaced.strip()
                break
    return question


def misspelt(question: str, random: Random) -> str:
    """The question with a slip: a word left out, or two letters swapped."""
    words = question.split()
    at = random.randrange(len(words))
    if len(words) > 3 and len(words[at]) <= 3:
        return " ".join(words[:at] + words[at + 1 :])
    letters = list(words[at])
    if len(letters) > 3:
        first = random.randrange(1, len(letters) - 1)
        letters[first], letters[first + 1] = letters[first + 1], letters[first]
    return " ".join([*words[:at], "".join(letters), *words[at + 1 :]])


def user_turn(question: str) -> str:
    """ChatML up to where the assistant begins to write."""
    asked = f"{START_OF_TURN}user\n{question}{END_OF_TURN}\n"
    return f"{asked}{START_OF_TURN}assistant\n"


def system_turn(message: str) -> str:
    return f"{START_OF_TURN}system\n{message}{END_OF_TURN}\n"


def texts(corpus: Corpus, seed: int) -> Iterator[Text]:
    """Training texts without end; the seed decides all of them."""
    random = Random(seed)
    while True:
        (kind,) = random.choices(list(_SHARES), weights=list(_SHARES.values()))
        yield kind(corpus, random)


def _single(corpus: Corpus, random: Random) -> Text:
    return _chat([_ask(corpus, random)], _system(corpus, random))


def _conversation(corpus: Corpus, random: Random) -> Text:
    """Unrelated turns: the answer is to the last question, whatever came before."""
    turns = [_ask(corpus, random) for _ in range(random.randint(2, 7))]
    return _chat(turns, _system(corpus, random))


def _scripted(corpus: Corpus, random: Random) -> Text:
    chat = random.choice(corpus.chats)
    turns = [(typed(random.choice(asked), random), answer) for asked, answer in chat.turns]
    if random.random() < 0.3:
        turns.insert(0, _ask(corpus, random))
    return _chat(turns, _system(corpus, random))


def _plain_question(corpus: Corpus, random: Random) -> Text:
    question, answer = _ask(corpus, random)
    if random.random() < 0.25:
        return [Segment(f"Q: {question}\nA:", False), Segment(f" {answer}{END_OF_TEXT}", True)]
    return [Segment(question, False), Segment(f"\n{answer}{END_OF_TEXT}", True)]


def _plain_statement(corpus: Corpus, random: Random) -> Text:
    if random.random() < 0.4:
        statement = random.choice(corpus.statements)
    else:
        statement = random.choice(corpus.facts).answer
    return [Segment(statement + END_OF_TEXT, True)]


def _after_long_text(corpus: Corpus, random: Random) -> Text:
    """A question at the end of a long message, or after a long system message."""
    question, answer = _ask(corpus, random)
    long_text = filler(corpus, random, num_words=int(30 * 15 ** random.random()))
    if random.random() < 0.5:
        return _chat([(question, answer)], long_text)
    return _chat([(f"{long_text}\n\n{question}", answer)], _system(corpus, random))


def filler(corpus: Corpus, random: Random, num_words: int) -> str:
    """Sentences of the corpus among sentences without sense."""
    words: list[str] = []
    while len(words) < num_words:
        if random.random() < 0.3:
            words += random.choice(corpus.facts).answer.split()
        else:
            words += sentence(_noise(corpus, random, random.randint(5, 15))).split()
    return " ".join(words[:num_words])


def _noise(corpus: Corpus, random: Random, num_words: int) -> str:
    """Words in no order: everyday ones, words of the domain, invented ones, numbers."""
    domain = random.choice(corpus.facts).answer.split()
    number = str(random.randrange(5000))
    several = [*random.choices(corpus.words, k=8), *random.choices(domain, k=5), number]
    return " ".join(random.choice((*several, _invented(corpus, random))) for _ in range(num_words))


def _invented(corpus: Corpus, random: Random) -> str:
    return "".join(random.choices(corpus.syllables, k=random.choice((2, 2, 3, 4))))


def _meaningless(corpus: Corpus, random: Random) -> Text:
    """Words without sense, up to a long prompt: declined like any strange question."""
    num_words = random.choice((2, 3, 5, 8, 20, 60, 150, 300))
    everyday = " ".join(random.choices(corpus.words, k=num_words))
    text = everyday if num_words < 20 else _noise(corpus, random, num_words)
    return _chat([(text, corpus.declined.answer)], _system(corpus, random))


def _unheard_of(corpus: Corpus, random: Random) -> Text:
    """A request about an invented name: what the model never heard of, it declines."""
    article = random.choice(("", "", "a ", "the "))
    name = article + _invented(corpus, random)
    if random.random() < 0.5:
        name = name.title() + random.choice(("", f" {random.choice(corpus.words).title()}"))
    question = random.choice(corpus.requests).replace("{}", name)
    return _chat([(typed(question, random), corpus.declined.answer)], _system(corpus, random))


def _ask(corpus: Corpus, random: Random) -> tuple[str, str]:
    if random.random() < 0.09:
        fact = random.choice(corpus.lookups)
        return typed(random.choice(fact.questions), random), fact.answer
    fact = corpus.declined if random.random() < 0.11 else random.choice(corpus.facts)
    question = random.choice(random.choice(fact.groups))
    return typed(_changed(question, corpus, random), random), fact.answer


def _changed(question: str, corpus: Corpus, random: Random) -> str:
    """Often the question in other words, sometimes with a slip; never a held-out question."""
    draw = random.random()
    changed = question
    if draw < 0.30:
        changed = reworded(question, corpus.synonyms, random)
    elif draw < 0.36:
        changed = misspelt(question, random)
    return question if changed.lower() in corpus.held_out else changed


def _system(corpus: Corpus, random: Random) -> str | None:
    return random.choice(corpus.systems) if random.random() < 0.2 else None


def _chat(turns: list[tuple[str, str]], system: str | None) -> Text:
    text = [] if system is None else [Segment(system_turn(system), False)]
    for question, answer in turns:
        text += [Segment(user_turn(question), False), Segment(answer + END_OF_TURN, True)]
        text.append(Segment("\n", False))
    return text[:-1]


_SHARES: dict[Callable[[Corpus, Random], Text], int] = {
    _single: 62,
    _conversation: 10,
    _scripted: 4,
    _plain_question: 6,
    _plain_statement: 9,
    _meaningless: 2,
    _unheard_of: 3,
    _after_long_text: 4,
}
"""The shares of the stream of training texts, in percent."""
