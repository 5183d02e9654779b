"""HTTP in and out: TGI's routes and OpenAI's, over the engine of ``caravan_router.core.engine``."""
