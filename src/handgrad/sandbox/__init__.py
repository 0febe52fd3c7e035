"""Run untrusted programs in a child process with CPU and memory limits: regular expressions, chat templates, answers.

Import `client.call` and `client.match` for expressions and templates, and `tensor_client.run` for Python functions on tensors;
`worker`, `templates` and `tensor_worker` run in a child only. This package knows nothing about models, tokenizers or files,
and no child imports handgrad, except single modules of formulas that an answer may use.
"""
