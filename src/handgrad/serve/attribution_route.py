"""`/v1/attribution`: which tokens the log-probability of a text depends on.

    {"model", "prompt" or "messages", "completion": "text"}      the completion's tokens are explained
    {"model", "prompt" or "messages", "targets": [5, 6]}         the prompt's tokens at these positions are explained

The answer has one entry for every token: its score, gradient · input, and the norm of the gradient.
"""

from collections.abc import Callable
from typing import Any

from ..errors import HandgradError
from ..inference.attribution import attribute
from ..lora.named import selected
from ..text.token_text import Offsets
from .api_errors import invalid
from .plans import encode, render, served
from .served_models import Models


def attribution(models: Models, asked: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Check the request, and return what the engine's thread is to compute."""
    model = served(models, asked["model"])
    if ("prompt" in asked) == ("messages" in asked):
        raise invalid("prompt", "give one of prompt and messages")
    if ("completion" in asked) == ("targets" in asked):
        raise invalid("completion", "give one of completion, a text to explain, and targets, positions of the prompt")
    if "messages" in asked:
        ids = render(models, model, asked)
    elif len(asked["prompt"]) == 1:
        ids = encode(models, "prompt", asked["prompt"][0])
    else:
        raise invalid("prompt", "attribution takes one prompt")
    targets = asked.get("targets")
    if targets is None:
        after = encode(models, "completion", asked["completion"])
        targets = list(range(len(ids), len(ids) + len(after)))
        ids = encode(models, "completion", ids + after)
    if max(targets) >= len(ids):
        raise invalid("targets", f"targets has {max(targets)}, and the prompt has {len(ids)} tokens, counted from 0")

    def compute() -> dict[str, Any]:
        try:
            with selected(models.network, model.adapter):
                found = attribute(models.network, ids, targets)
        except HandgradError as reason:
            raise invalid("targets", reason) from None
        tokens = models.tokens
        offsets = Offsets(tokens, beginning=True).all(ids)
        scores, norms = found.scores.tolist(), found.norms.tolist()
        entries = [
            {
                "index": t,
                "id": i,
                "token": tokens.name(i),
                "text_offset": offsets[t],
                "score": scores[t],
                "norm": norms[t],
            }
            for t, i in enumerate(ids)
        ]
        return {
            "object": "attribution",
            "model": model.name,
            "logprob": found.logprob,
            "targets": found.targets,
            "tokens": entries,
        }

    return compute
