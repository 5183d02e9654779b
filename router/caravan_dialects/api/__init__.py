"""The dialects as values: bodies, rules, validation, generations and replies as bytes. It needs no network.

The web application (`caravan_router.http`) and the Python package (`caravan`) stand on it alike.
"""
