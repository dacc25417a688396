# Flags shared by all targets, as an interface target; instruction-set flags are added per kernel library.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

add_library(dyno_flags INTERFACE)
target_include_directories(dyno_flags INTERFACE ${CMAKE_SOURCE_DIR}/csrc)
target_compile_options(dyno_flags INTERFACE -Wall -Wextra -fvisibility=hidden)
if(DYNO_WERROR)
  target_compile_options(dyno_flags INTERFACE -Werror)
endif()
if(CMAKE_UNITY_BUILD AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # gcc treats each source of a unit as a header, and warns of classes with members from an unnamed namespace.
  target_compile_options(dyno_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-subobject-linkage>)
endif()

if(NOT DYNO_SANITIZE STREQUAL "off")
  string(REPLACE "+" "," _sanitizers ${DYNO_SANITIZE})
  target_compile_options(dyno_flags INTERFACE -fsanitize=${_sanitizers} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(dyno_flags INTERFACE -fsanitize=${_sanitizers})
endif()

if(DYNO_BUILD_FUZZ)
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_FLAGS "-fsanitize=fuzzer,address,undefined")
  check_cxx_source_compiles([[
    #include <cstddef>
    #include <cstdint>
    extern "C" int LLVMFuzzerTestOneInput(const uint8_t*, size_t) { return 0; }
  ]] DYNO_HAVE_LIBFUZZER)
  unset(CMAKE_REQUIRED_FLAGS)
  if(DYNO_HAVE_LIBFUZZER AND DYNO_SANITIZE MATCHES "address")
    # The session target runs the whole engine, so all code reports its branches to libFuzzer. Its mutator knows the
    # format and does not need compared values; only the target of the reader traces these.
    target_compile_options(dyno_flags INTERFACE -fsanitize=fuzzer-no-link -fno-sanitize-coverage=trace-cmp)
  endif()
endif()

if(GGML_LTO)
  include(CheckIPOSupported)
  check_ipo_supported(RESULT _ipo OUTPUT _ipo_reason LANGUAGES CXX)
  if(NOT _ipo)
    message(FATAL_ERROR "GGML_LTO=ON, but this compiler cannot: ${_ipo_reason}")
  endif()
  set(CMAKE_INTERPROCEDURAL_OPTIMIZATION ON)
  # With this analysis, the link of GCC 12.2 drops the initialisation of the temporary in std::vector's move assignment, and
  # a session ends with "free(): invalid pointer".
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION MATCHES "^12[.]")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fno-ipa-modref>)
  endif()
endif()

# Kernel sources are compiled once per instruction set, each time into its own namespace (DYNO_ISA_NS). Only these
# translation units get instruction-set flags, and they include no header with inline functions of the standard library
# that another unit could end up calling.
set(DYNO_ISAS portable)
set(DYNO_ISA_FLAGS_portable "")
set(_best portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(DYNO_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c -mbmi2)
  set(DYNO_ISA_FLAGS_avx512_vnni -mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni
      -mprefer-vector-width=512)
  list(APPEND DYNO_ISAS avx2 avx512_vnni)
  if(GGML_NATIVE OR DYNO_CPU_KERNELS STREQUAL "best")
    include(CheckCXXSourceCompiles)
    set(CMAKE_REQUIRED_FLAGS "-march=native")
    check_cxx_source_compiles("#ifndef __AVX512VNNI__\n#error no\n#endif\nint main() { return 0; }" DYNO_NATIVE_AVX512)
    if(NOT DYNO_NATIVE_AVX512)
      check_cxx_source_compiles("#ifndef __AVX2__\n#error no\n#endif\nint main() { return 0; }" DYNO_NATIVE_AVX2)
    endif()
    unset(CMAKE_REQUIRED_FLAGS)
    if(DYNO_NATIVE_AVX512)
      set(_best avx512_vnni)
    elseif(DYNO_NATIVE_AVX2)
      set(_best avx2)
    endif()
  endif()
endif()
if(DYNO_CPU_KERNELS STREQUAL "best")
  set(DYNO_ISAS ${_best})
elseif(NOT DYNO_CPU_KERNELS STREQUAL "all")
  set(_known ${DYNO_ISAS})
  list(REMOVE_DUPLICATES DYNO_CPU_KERNELS)
  set(_unknown ${DYNO_CPU_KERNELS})
  list(REMOVE_ITEM _unknown ${_known})
  if(_unknown OR NOT DYNO_CPU_KERNELS)
    string(REPLACE ";" ", " _known "${_known}")
    message(FATAL_ERROR "DYNO_CPU_KERNELS=${DYNO_CPU_KERNELS}: expected all, best, or a list of ${_known}")
  endif()
  set(DYNO_ISAS ${DYNO_CPU_KERNELS})
endif()
if(GGML_NATIVE)
  if(NOT DYNO_CPU_KERNELS MATCHES "^(all|best)$" AND NOT DYNO_ISAS STREQUAL _best)
    message(FATAL_ERROR "GGML_NATIVE=ON compiles kernels for ${_best} alone, and contradicts "
                        "DYNO_CPU_KERNELS=${DYNO_CPU_KERNELS}: leave out the one or the other")
  endif()
  set(DYNO_ISAS ${_best})
  set(DYNO_ISA_FLAGS_${_best} -march=native)
  if(_best STREQUAL "avx512_vnni")
    list(APPEND DYNO_ISA_FLAGS_${_best} -mprefer-vector-width=512)
  endif()
endif()

# dyno_add_isa_sources(FILE…): kernel sources, relative to the calling folder.
function(dyno_add_isa_sources)
  foreach(_isa IN LISTS DYNO_ISAS)
    foreach(_file IN LISTS ARGN)
      target_sources(dyno_kernels_${_isa} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/${_file})
    endforeach()
  endforeach()
endfunction()

# dyno_unity_groups(TARGET MOST FILE…): files of one folder, up to MOST at a time, that CMAKE_UNITY_BUILD compiles together.
# The groups are the same in every build, so that a clash of names at file scope shows in every build.
function(dyno_unity_groups target most)
  foreach(_file IN LISTS ARGN)
    cmake_path(ABSOLUTE_PATH _file BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR} OUTPUT_VARIABLE _path)
    cmake_path(GET _path PARENT_PATH _folder)
    cmake_path(RELATIVE_PATH _folder BASE_DIRECTORY ${CMAKE_SOURCE_DIR}/csrc)
    string(MAKE_C_IDENTIFIER "${_folder}" _folder)
    list(APPEND _of_${_folder} ${_file})
    list(LENGTH _of_${_folder} _count)
    math(EXPR _number "(${_count} - 1) / ${most}")
    set_source_files_properties(${_file} TARGET_DIRECTORY ${target} PROPERTIES UNITY_GROUP ${_folder}_${_number})
  endforeach()
endfunction()

# dyno_precompile(TARGET HEADER…): CMAKE_UNITY_BUILD compiles the headers of nearly every unit once. Other builds do not, so
# that they show a header that a file lacks. gcc and clang refuse the result in a source with options of its own.
function(dyno_precompile target)
  if(CMAKE_UNITY_BUILD)
    target_precompile_headers(${target} PRIVATE ${ARGN})
  endif()
endfunction()
