"""Loads what the gateway needs of a model: configuration, tokenizer and chat template."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from services.gateway.output.parser.choice import Parsers
from services.gateway.output.parser.message import MessageFormat
from services.gateway.workers.models.generation_config import GenerationConfig
from services.gateway.workers.models.structures import StructureChecker
from services.gateway.workers.models.template_traits import TemplateTraits
from services.model.checkpoint.embedding_config import EmbeddingConfig
from services.model.checkpoint.reading import read_model_config
from services.model.config.model_config import ModelConfig
from services.model.text.chat_template import ChatTemplate
from services.model.text.pieces import Pieces
from services.model.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the gateway sees it, without weights."""

    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None if the checkpoint has no chat template."""
    template_traits: TemplateTraits | None
    """The features of its chat template; None if it has no template."""
    structures: StructureChecker
    format: MessageFormat
    message_pieces: Pieces
    """The pieces of tokens in messages, with the special tokens that belong to `format`."""
    embedding: EmbeddingConfig = field(default=EmbeddingConfig())


def load_model(
    directory: str, generation: GenerationConfig | None = None, parsers: Parsers | None = None
) -> Model:
    """Loads a model from its directory. Takes up to seconds for a large vocabulary. `generation`
    and `parsers` are the deployment's; None takes the model's.

    Raises StartupError if files are missing or wrong.
    """
    path = Path(directory)
    tokenizer = Tokenizer.from_directory(path)
    config = read_model_config(path)
    if generation is not None:
        config = replace(config, generation=generation.defaults(config.generation))
    template = ChatTemplate.from_directory(path, tokenizer.special_tokens)
    form = (parsers or Parsers()).format(template.source if template else None)
    return Model(
        config=config,
        tokenizer=tokenizer,
        structures=StructureChecker(path, config.vocab_size, config.eos_token_ids),
        chat_template=template,
        template_traits=None if template is None else TemplateTraits.of(template),
        format=form,
        message_pieces=tokenizer.pieces_with(form.markers),
        embedding=EmbeddingConfig.from_directory(path),
    )
