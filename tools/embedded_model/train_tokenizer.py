"""Trains the byte-level BPE tokenizer on the corpus and writes it in Hugging Face format."""

import json
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.embedded_model.corpus import Corpus
from tools.embedded_model.render import END_OF_TEXT, END_OF_TURN, START_OF_TURN, texts

SPECIAL_TOKENS = [END_OF_TEXT, START_OF_TURN, END_OF_TURN]
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- endif %}"
)


def train_tokenizer(corpus: Corpus, vocab_size: int, max_length: int, folder: Path) -> Tokenizer:
    """Writes `tokenizer.json` and `tokenizer_config.json` (with the chat template)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(corpus), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return tokenizer


def _sample(corpus: Corpus) -> list[str]:
    """Every answer once, and a sample of the training texts for everything else."""
    stream = islice(texts(corpus, seed=0), 20_000)
    sampled = [segment.text for text in stream for segment in text]
    return sampled + [fact.answer for fact in corpus.all_facts()]
