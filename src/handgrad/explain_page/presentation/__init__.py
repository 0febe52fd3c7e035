"""How the page writes and draws: symbols and numbers, captions, pictures of matrices, probabilities.

Import the functions from the modules. Nothing here knows the routes or the stations; a number inside a sentence is marked,
and assets/format.js writes it.
"""
