"""The explain page: a page in the browser that shows one forward and one backward pass of a real model, layer by layer.

`handgrad explain` serves it, `hg.explain` puts it into a notebook. Nothing here chooses or saves a model, and a step changes
a copy of its weights. Nothing here differentiates: gradients come from the model, checks from `handgrad.proof`. The order of
a block's layers comes from `Block.steps()`: what is shown of a step follows from its kind.

json_types.py   every JSON that the page reads, declared      routes.py   the requests, each with the function that answers
server.py       the web server on this machine                export.py   the page as one file
notebook.py     hg.explain                                    page_files.py   the files of the page
engine_data.py  a model as data for assets/engine/, which computes it in the browser
live_data.py    the same, with what else assets/live/ needs
exercises.py, course.py   the exercises of `handgrad.learn` on the tensors of a sentence

stations/       a station per step of the network: formulas, parameters, source code
session/        traced sentences and versions of the weights, within a memory limit; what is differentiated
views/          the data of each view
follow/         the sum of products that made one number
proofs/         the checks of every station, computed in the background
presentation/   symbols, numbers, captions, pictures of matrices, probabilities
assets/         the page: page.js starts it, views.js lists its views, one module each; render.js changes the document,
                format.js writes numbers, heatmap.js shows every matrix (heat_geometry.js, heat_paint.js)
                api.js is the one interface to the data; behind it server.js, stored.js or live.js
assets/engine/  the formulas of `paper` in JavaScript, for pages without a server
assets/live/    the answers of routes.py, computed there
"""
