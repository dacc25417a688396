// The other half of lto_caller.cu. Without a link that optimises across files this would be a call.
__device__ int lto_triple(int value) { return 3 * value; }
