"""Run untrusted regular expressions and chat templates in a child process with CPU and memory limits.

Import `client.call` and `client.match`; `worker` and `templates` run in the child only. This package knows nothing about
models, tokenizers or files, and the child imports neither handgrad nor torch.
"""
