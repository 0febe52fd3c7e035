"""Errors in the form of OpenAI's interface: {"error": {"message", "type", "param", "code"}}."""

from typing import Any


class ApiError(Exception):
    """What a client is told. `param` names the parameter that is wrong."""

    def __init__(self, status: int, message: object, param: str | None = None, code: str | None = None):
        super().__init__(str(message))
        self.status, self.param, self.code = status, param, code

    def content(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str, message: object) -> ApiError:
    """A parameter has a wrong value."""
    return ApiError(400, message, param, "invalid_value")
