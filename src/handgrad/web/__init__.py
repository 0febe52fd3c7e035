"""Serving over HTTP with limits: what the explain page and the model server share.

Import `BackgroundServer`, which listens, runs in the foreground or in a thread, and closes connections that take too long.
This package knows FastAPI and uvicorn; nothing of models.
"""
