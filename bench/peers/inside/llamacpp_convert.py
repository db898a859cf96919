"""Writes a checkpoint as a GGUF file; run by the interpreter of llama.cpp's environment.

    python llamacpp_convert.py SOURCE --outtype bf16 --outfile model.gguf CHECKPOINT

SOURCE is llama.cpp's tree. Its converter knows pre-tokenizers by a hash of what they do to one
text, which the tokenizer of a made-up checkpoint cannot match: here it counts as GPT-2's.
"""

import sys


def main() -> None:
    sys.path.insert(0, sys.argv.pop(1))
    import convert_hf_to_gguf as converter  # type: ignore[import-not-found]
    from conversion.base import TextModel  # type: ignore[import-not-found]

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    converter.main()


if __name__ == "__main__":
    main()
