"""What a user sees in the terminal: the progress of a run, the tables of a plan, the summary of fine-tuning data, a chat.

Import the displays from `progress`, the tables from `plan`, `report` from `examples`. This package formats
numbers that others computed; it decides nothing and writes no files.
"""
