"""The cost of a training step before it runs: parameters, FLOP, bytes and seconds, from the model's configuration.

Import `make_plan`, `plan_model` and `Plan` from `estimate`, `predict` and `Peak` from `timing`, `flop` and `Work` from
`flop`. This package knows models and adapters; it knows nothing of data, runs or how a plan is displayed.
"""
