"""Model families: how each names the fields of its config.json.

Import the table of a family, such as `gpt2`. A family is data: it knows the model's configuration and has no code paths
of its own.
"""
