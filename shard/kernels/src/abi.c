// The number of what the shard calls: functions, their parameters, and the fields of what they are passed.
//
// A shard does not start with a build of another number. Raise it with each change of those, and with it KERNELS_ABI in
// caravan_shard/backends/llama/kernels/kernels_abi.py.
#define CARAVAN_KERNELS_ABI 1

__attribute__((visibility("default"))) int caravan_kernels_abi(void);

int caravan_kernels_abi(void) { return CARAVAN_KERNELS_ABI; }
