"""Names and shapes of a checkpoint's tensors.

Families use Llama's names for linears; their rows say how their norms are called.
"""

from services.common.text.model_config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

Shape = tuple[int, ...]


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}"


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The shape of each tensor that a checkpoint with this config must have, by name."""
    shapes: dict[str, Shape] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"{layer_prefix(layer)}.{name}"] = shape
    return shapes


def ignored_weights(config: ModelConfig) -> frozenset[str]:
    """Tensors that a checkpoint may contain although they are not used: some checkpoints with tied
    embeddings contain the head too."""
    return frozenset({HEAD}) if config.tied_embeddings else frozenset()


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, wide = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.o_bias),
        "mlp.gate_proj": (wide, hidden, config.mlp_bias),
        "mlp.up_proj": (wide, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, wide, config.mlp_bias),
    }
    norms = config.family.norms
    shapes: dict[str, Shape] = {
        f"{name}.weight": (hidden,) for name in (norms.attention_in, norms.mlp_in)
    }
    if config.family.qk_norm == "per head":
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes
