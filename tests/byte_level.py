"""Small byte-level tokenizers, as those of Qwen and Llama 3 are: BPE over bytes."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.normalizers import Normalizer


def byte_level(
    corpus: Sequence[str],
    vocab_size: int,
    special: Sequence[str] = ("<s>", "</s>"),
    normalizer: Normalizer | None = None,
) -> Tokenizer:
    """`special`: tokens that come first in the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*special],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer
