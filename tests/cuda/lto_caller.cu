// A kernel in one file that calls a function of another: the least that a device link has to do. See CMakeLists.txt.
__device__ int lto_triple(int value);

__global__ void lto_kernel(int* values) { values[threadIdx.x] = lto_triple(values[threadIdx.x]); }

// Returns the CUDA error of launching it over `count` values on the host, which come back tripled.
extern "C" int lto_launch(int* values, int count) {
  int* device = nullptr;
  const size_t bytes = sizeof(int) * static_cast<size_t>(count);
  cudaError_t error = cudaMalloc(&device, bytes);
  if (error == cudaSuccess) error = cudaMemcpy(device, values, bytes, cudaMemcpyHostToDevice);
  if (error == cudaSuccess) {
    lto_kernel<<<1, count>>>(device);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess) error = cudaMemcpy(values, device, bytes, cudaMemcpyDeviceToHost);
  cudaFree(device);
  return static_cast<int>(error);
}
