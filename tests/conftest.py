"""What holds for all tests."""

import signal

from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")

# A shell starts what runs in the background with Ctrl-C ignored, and the programs that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
