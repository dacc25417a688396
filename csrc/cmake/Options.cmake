# Build switches. Names that users of llama.cpp know keep their GGML_ prefix. Each one changes something that a test
# can see (tests/build/), and all are recorded in the module (`dyno info`).

set(DYNO_VERSION "0.2.0" CACHE STRING "Version recorded in the module; set by the Python build")
set(DYNO_OPS_REVISION 1)  # raise when a kernel's meaning changes, so that older profiles are re-checked

option(GGML_NATIVE "Compile the CPU kernels for this machine alone (-march=native)" OFF)
set(DYNO_CPU_KERNELS "all" CACHE STRING "Instruction sets with CPU kernels: all, best (this machine's), or a list of portable, avx2, avx512_vnni")
option(GGML_LTO "Link-time optimisation of host code" OFF)
option(DYNO_BUILD_PYTHON "Build the Python module" ON)
option(DYNO_BUILD_FUZZ "Build the fuzz targets; with DYNO_SANITIZE=thread the program of sessions in threads" OFF)
option(DYNO_WERROR "Warnings are errors" OFF)
# For tests only: wrong kernels, to test the tuner's check of answers. benchmarks/quality_gate.py needs such a build.
option(DYNO_TEST_FAULTS "Compile configurations of products that are wrong by a few percent" OFF)
set(DYNO_SANITIZE "off" CACHE STRING "Sanitizers: off, address, undefined, address+undefined, thread")
set_property(CACHE DYNO_SANITIZE PROPERTY STRINGS off address undefined address+undefined thread)

if(NOT DYNO_SANITIZE MATCHES "^(off|address|undefined|address\\+undefined|thread)$")
  message(FATAL_ERROR "DYNO_SANITIZE=${DYNO_SANITIZE}: expected off, address, undefined, address+undefined or thread")
endif()

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
