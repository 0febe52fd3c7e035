"""GLM-4-0414: GLM-4 with a norm after each branch as well."""

from dataclasses import replace

from .glm import GLM

GLM4 = replace(
    GLM,
    name="glm4",
    architecture="Glm4ForCausalLM",
    names={**GLM.names, "post_1": "post_self_attn_layernorm", "post_2": "post_mlp_layernorm"},
)
