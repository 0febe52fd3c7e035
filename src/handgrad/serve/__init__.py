"""`handgrad serve`: a model, and adapters of it by name, behind the HTTP interface of OpenAI.

    requests.py    the parameters of each route, checked; errors in OpenAI's form
    runner.py      the thread that owns the engine; requests wait, run, are cancelled and time out
    plans.py       from parameters to sequences of the engine
    tools.py       functions that a client offers, and their calls in answers
    answers.py     completions and chats as JSON, at once or as a stream of events
    embeddings.py, attribution.py   the routes that compute something else
    server.py      the routes and limits; `Server` listens

Import `Server` and `open_models`. The package knows inference and models on disk; it knows nothing of training.
"""
