"""`handgrad explain`: a page in the browser that shows one forward and one backward pass of a real model, layer by layer.

Import `Session` (a model and its traced sentences) from session.py, `Server` (the page on this machine) from server.py
and `export` (the page as one file) from export.py. Nothing here chooses or saves a model, and
steps.py changes a copy of its weights. Nothing here differentiates: gradients come from the model, checks from
`handgrad.proof`.

stations.py   the list of stations, one per layer        formulas.py   their formulas    sources.py   their source code
session.py    traced sentences and versions of the weights, within a memory limit; progress.py: how far a trace has come;
              sentence_trace.py: a trace that computes the gradients of a layer when one is read
objectives.py what is differentiated                     notebook.py   the page in a notebook
views.py      the data of the overview and of a station; attention_view.py, lens_view.py, neuron_view.py, swaps_view.py and
              values.py: of attention heads, of the lenses, of token swaps, of single cells; compare_view.py: of two traces
what_if.py    a head, a skip connection, a neuron or an attention weight set to 0; attribution_view.py: which tokens count
follow.py     the sum of products that made one number; follow_forward.py and follow_signals.py have the rules
captions.py   the sentence under each picture            pictures.py   matrices reduced to a size that can be drawn
steps.py      one optimizer step, predicted and measured
proof.py      the checks of every station, computed in the background
server.py     the web server                             export.py     the same page as one file
page_files.py the files of the page                      predictions.py   the forward pass alone, while the reader types
assets/       the page: page.js starts it, views.js lists its views, one module each; render.js changes the document,
              format.js writes numbers, heatmap.js shows every matrix (heat_geometry.js, heat_paint.js)
"""

import sys
from types import ModuleType
from typing import Any


class _Explain(ModuleType):
    """`hg.explain(model, text)` calls the package of that name: it returns the page for a notebook."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from .notebook import explain

        return explain(*arguments, **options)


sys.modules[__name__].__class__ = _Explain
