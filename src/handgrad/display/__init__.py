"""What a user sees in the terminal: the progress of a run, the tables of a plan, the summary of fine-tuning data, a chat.

Import from its modules: `run_progress`, `plan_table`, `data_summary`, `example_tables`, `course_tables`, `chat_output`. This
package formats numbers that others computed; it decides nothing and writes no files.
"""
