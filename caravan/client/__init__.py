"""A client of a Caravan server, for what Caravan adds to other servers. For everything else use OpenAI's client."""

try:
    from caravan.client.async_client import AsyncClient, AsyncServedConversation, ClientOptions
    from caravan.client.bodies import RespondOptions
    from caravan.client.client import Client, ServedConversation
    from caravan.client.errors import (
        AbortedError,
        ApiError,
        AuthenticationError,
        BadReplyError,
        ConnectionLostError,
        ContextLengthError,
        ConversationBusyError,
        ErrorDetails,
        ForbiddenError,
        HeadMovedError,
        InternalError,
        InvalidRequestError,
        NotFoundError,
        NotStoredError,
        OverloadedError,
        RateLimitError,
        ServerConnectionError,
        ServerDeadlineError,
        ServerGenerationError,
        UnavailableError,
        UnreachableError,
    )
    from caravan.client.outputs import (
        ConversationExport,
        Delete,
        Insert,
        Replace,
        Response,
        ResponsePart,
        ResponseUsage,
    )
except ModuleNotFoundError as missing:
    from caravan_proto.packages import Part, import_error

    raise import_error("caravan.client", Part.CLIENT, missing) from None

__all__ = [
    "AbortedError",
    "ApiError",
    "AsyncClient",
    "AsyncServedConversation",
    "AuthenticationError",
    "BadReplyError",
    "Client",
    "ClientOptions",
    "ConnectionLostError",
    "ContextLengthError",
    "ConversationBusyError",
    "ConversationExport",
    "Delete",
    "ErrorDetails",
    "ForbiddenError",
    "HeadMovedError",
    "Insert",
    "InternalError",
    "InvalidRequestError",
    "NotFoundError",
    "NotStoredError",
    "OverloadedError",
    "RateLimitError",
    "Replace",
    "RespondOptions",
    "Response",
    "ResponsePart",
    "ResponseUsage",
    "ServedConversation",
    "ServerConnectionError",
    "ServerDeadlineError",
    "ServerGenerationError",
    "UnavailableError",
    "UnreachableError",
]
