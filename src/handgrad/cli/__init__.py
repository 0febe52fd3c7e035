"""The command line: one file per command, named after it; each parses its options, calls another package and prints.

Import `main` or `app` from `cli.app`. Commands import torch inside their functions, so that `handgrad --help` is fast;
nothing here computes or decides, and no other package imports this one.
"""
