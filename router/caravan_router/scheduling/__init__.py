"""The pure heart: events in, actions out. May import only the standard library's data types; never asyncio, clocks,
randomness, grpc or another package of the router.
"""
