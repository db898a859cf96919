"""The fields of a config.json that do not change what a model computes from its tokens.

A field that is neither read nor neutral may change the arithmetic, so a checkpoint that has one is
refused: it would load, and its answers would be wrong.
"""

import re
from collections.abc import Iterable

from services.model.config.json_fields import JsonFields

_NAMES = frozenset(
    # what the checkpoint is, and what wrote it
    (
        *("architectures", "model_type", "torch_dtype", "dtype", "auto_map", "name_or_path"),
        *("model_name", "base_model", "tokenizer_class", "processor_class", "license"),
        *("task_specific_params", "finetuning_task", "problem_type", "id2label", "label2id"),
        *("is_llama_config", "transformers.js_config", "unsloth_fixed"),
        # read where it has a meaning, and ignored elsewhere by transformers
        "original_max_position_embeddings",
        # training
        *("initializer_range", "initializer_factor", "z_loss", "pretraining_tp"),
        *("gradient_checkpointing", "classifier_dropout", "router_aux_loss_coef"),
        *("router_jitter_noise", "neftune_noise_alpha"),
        # embeddings: `services.model.checkpoint.embedding_config` reads them
        *("is_matryoshka", "matryoshka_dimensions", "num_labels", "sentence_transformers"),
        "sbert_ce_default_activation_function",
        # how transformers runs the model
        *("use_cache", "cache_implementation", "attn_implementation", "torchscript"),
        *("return_dict", "use_return_dict", "output_attentions", "output_hidden_states"),
        *("is_decoder", "chunk_size_feed_forward", "use_bfloat16", "output_router_logits"),
        # generation, which generation_config.json overrides
        *("temperature", "top_k", "top_p", "typical_p", "do_sample", "num_beams"),
        *("min_length", "max_length", "max_new_tokens", "repetition_penalty", "length_penalty"),
        *("no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "num_beam_groups"),
        # the tokenizer
        *("model_max_length", "bos_token", "eos_token", "pad_token", "unk_token"),
    )
)
_PATTERN = re.compile(r"_.*|.*(_dropout|_pdrop|_version|_token_ids?|_token_index)")


def check_all_read(fields: JsonFields, ignored: Iterable[str] = ()) -> None:
    """Raises StartupError, with the name, if `fields` has a field that nothing has read, that is
    not neutral, and that says something: not null, false, 0, or empty."""
    for name in fields.unread():
        if name in _NAMES or name in ignored or _PATTERN.fullmatch(name):
            continue
        raise fields.wrong(
            name,
            f"{fields.values[name]!r}: Quire does not know this field, which may change what the "
            "model computes; if it does not, remove it from the file",
        )
