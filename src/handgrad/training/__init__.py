"""Training: the options of a run, its preparation, the loop, its folder, several processes.

Import `execute` and `Request` from `lifecycle`, the options from `config`, `prepare` from `pretrain` or `finetune`. This
package writes runs and reports progress to a `Display`; it does not parse a command line and prints nothing itself.
"""
