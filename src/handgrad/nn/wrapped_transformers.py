"""A wrapped model as one of transformers' models: with its config, `generate`, and what trainers such as TRL's ask for."""

import copy
import warnings
from pathlib import Path
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel

from ..errors import HandgradError
from ..formats.config_json import config_json
from ..model.gpt import GPT
from .wrapping import Output, Wrapped


class PreTrainedWrapped(Wrapped, PreTrainedModel, GenerationMixin):  # type: ignore[misc,no-untyped-call]
    """A handgrad model that transformers treats as a PreTrainedModel."""

    config_class = PreTrainedConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def __init__(self, model: GPT):
        fields: dict[str, Any] = config_json(model.config, model.dtype)
        with warnings.catch_warnings():  # of fields under the names that older versions read too
            warnings.simplefilter("ignore", FutureWarning)
            config = CONFIG_MAPPING.get(fields["model_type"], PreTrainedConfig).from_dict(fields)
        config.name_or_path = model.source if Path(model.source).is_dir() else ""
        super().__init__(model, config)
        self.loss_type = Wrapped.loss_type  # transformers derives it from the name of the class
        self.generation_config = GenerationConfig.from_model_config(config)

    @property
    def base_model(self) -> nn.Module:
        """The model without its logits layer."""
        return Body(self)

    def get_input_embeddings(self) -> nn.Module:
        return self.handgrad_model.embed

    def get_output_embeddings(self) -> nn.Module:
        """The logits layer, whose weight trainers with a loss of their own multiply by the hidden states."""
        if self.handgrad_model.head.adapted:
            raise HandgradError("the logits layer has an adapter, which a product with its weight would leave out")
        if not self.handgrad_model.logit_map.identity:
            raise HandgradError(
                "the logits of this model are scaled or capped, which a product with the weight of its logits layer would"
                " leave out: compute the loss from the logits"
            )
        return self.handgrad_model.head

    def generate(self, *args: Any, generation_config: Any = None, **options: Any) -> Any:
        """transformers' generation, without a cache: every token is computed from all before it. `hg.generate` has one."""
        config = copy.deepcopy(self.generation_config if generation_config is None else generation_config)
        config.use_cache = False
        return super().generate(*args, generation_config=config, **options)  # type: ignore[misc]

    @property
    def peft_config(self) -> Any:  # type: ignore[override]
        """PEFT asks for it before it adds adapters; the layers of a wrapped model are not torch's, and PEFT knows none of
        them."""
        raise HandgradError(
            "PEFT cannot add adapters to a model of handgrad: call hg.lora.inject(model) before hg.nn.wrap(model), and train"
            " it without a peft_config; PEFT opens what save_pretrained writes"
        )


class Body(nn.Module):
    """A wrapped model up to the input of its logits layer. It owns nothing."""

    def __init__(self, wrapped: Wrapped):
        super().__init__()
        self.__dict__["wrapped"] = wrapped

    def forward(self, *args: Any, **options: Any) -> Output:
        return self.__dict__["wrapped"].hidden_states(*args, **options)  # type: ignore[no-any-return]
