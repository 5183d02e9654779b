// How compute threads wait for each other; see barrier.c.

#pragma once

#include <stdatomic.h>

// Wait until all ``threads`` have called it. ``arrived`` and ``passed`` are theirs alone, and begin as 0.
__attribute__((visibility("hidden"))) void caravan_wait_for_all(atomic_int * arrived, atomic_int * passed, int threads);
