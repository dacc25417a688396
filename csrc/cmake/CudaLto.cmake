# Device link-time optimisation: libnvvm, and the link itself. Included by Cuda.cmake, once the CUDA language is enabled.
# Leaves dyno_device_link().

if(CUDAToolkit_VERSION VERSION_LESS 12.8)
  message(FATAL_ERROR "GGML_CUDA_LTO=ON needs CUDA 12.8 or newer for a parallel device link, not ${CUDAToolkit_VERSION}")
endif()

# ---- libnvvm -------------------------------------------------------------------------------------------------------
# Some packages of the toolkit lack it, and without this check the error would come after the whole compilation. A
# toolkit from Python packages has it in another folder, where nvcc does not look.
set(_nvvm_home "${CUDAToolkit_LIBRARY_ROOT}/nvvm/lib64")
find_library(DYNO_LIBNVVM nvvm PATHS ${_nvvm_home} NO_DEFAULT_PATH)
mark_as_advanced(DYNO_LIBNVVM)
set(_libnvvm "${DYNO_LIBNVVM}")
if(NOT _libnvvm)
  set(_finder ${CMAKE_SOURCE_DIR}/csrc/cmake/find_nvvm.py)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${_finder})
  execute_process(COMMAND ${Python_EXECUTABLE} -E ${_finder} ${CUDAToolkit_VERSION} RESULT_VARIABLE _nvvm_result
                  OUTPUT_VARIABLE _libnvvm ERROR_VARIABLE _nvvm_missing OUTPUT_STRIP_TRAILING_WHITESPACE
                  ERROR_STRIP_TRAILING_WHITESPACE)
  if(NOT _nvvm_result EQUAL 0)
    set(_libnvvm "")
    if(NOT "${DYNO_LIBNVVM}" STREQUAL "")  # empty: do not use the toolkit's
      find_library(_libnvvm_beside nvvm PATHS ${CUDAToolkit_LIBRARY_ROOT}/lib64 ${CUDAToolkit_LIBRARY_ROOT}/lib
                   NO_DEFAULT_PATH NO_CACHE)
      set(_libnvvm "${_libnvvm_beside}")
    endif()
  endif()
endif()
if(NOT _libnvvm)
  # Indented lines are not wrapped, so the command can be copied.
  message(FATAL_ERROR "GGML_CUDA_LTO=ON needs libnvvm for the device link. ${_nvvm_home} has none, and "
                      "${_nvvm_missing}\nLeave GGML_CUDA_LTO out to build without it.")
endif()
message(STATUS "GGML_CUDA_LTO: ON, with ${_libnvvm}")

# nvcc only searches its own toolkit, which it finds by the folder of its own path. For a library from elsewhere, a
# folder of links holds the whole toolkit and this library.
set(_linking_nvcc ${CMAKE_CUDA_COMPILER})
if(NOT _libnvvm STREQUAL "${_nvvm_home}/libnvvm.so")
  set(_links ${CMAKE_BINARY_DIR}/toolkit_with_nvvm)
  file(REMOVE_RECURSE ${_links})
  file(MAKE_DIRECTORY ${_links}/bin ${_links}/nvvm/lib64)
  file(GLOB _tools ${CUDAToolkit_BIN_DIR}/*)
  foreach(_tool IN LISTS _tools)
    cmake_path(GET _tool FILENAME _file)
    file(CREATE_LINK ${_tool} ${_links}/bin/${_file} SYMBOLIC)
  endforeach()
  file(GLOB _parts ${CUDAToolkit_LIBRARY_ROOT}/nvvm/*)
  list(REMOVE_ITEM _parts ${_nvvm_home})
  foreach(_part IN LISTS _parts)
    cmake_path(GET _part FILENAME _file)
    file(CREATE_LINK ${_part} ${_links}/nvvm/${_file} SYMBOLIC)
  endforeach()
  file(GLOB _parts ${CUDAToolkit_LIBRARY_ROOT}/*)
  foreach(_part IN LISTS _parts)
    cmake_path(GET _part FILENAME _file)
    if(NOT EXISTS ${_links}/${_file})
      file(CREATE_LINK ${_part} ${_links}/${_file} SYMBOLIC)
    endif()
  endforeach()
  file(CREATE_LINK ${_libnvvm} ${_links}/nvvm/lib64/libnvvm.so SYMBOLIC)
  set(_linking_nvcc ${_links}/bin/nvcc)
  if(NOT EXISTS ${_linking_nvcc} OR NOT EXISTS ${_links}/bin/nvcc.profile)
    message(FATAL_ERROR "GGML_CUDA_LTO=ON: ${CUDAToolkit_BIN_DIR} has no nvcc with its nvcc.profile, so ${_libnvvm} cannot "
                        "be put beside them. Name the toolkit's own compiler with -DCMAKE_CUDA_COMPILER=…/bin/nvcc, or "
                        "leave GGML_CUDA_LTO out")
  endif()
endif()
set(DYNO_LINKING_NVCC ${_linking_nvcc} CACHE INTERNAL "The nvcc of device links")

# ---- the link ------------------------------------------------------------------------------------------------------
# dyno_device_link(TARGET LIBRARY OUTPUT REPORT): TARGET gets the objects of LIBRARY and the machine code of one device
# link that optimises across them, on all cores.
function(dyno_device_link target library output report)
  set_target_properties(${library} PROPERTIES CUDA_SEPARABLE_COMPILATION ON CUDA_ARCHITECTURES OFF)
  set(_codes "")
  foreach(_arch IN LISTS CMAKE_CUDA_ARCHITECTURES)
    string(REGEX REPLACE "-real$" "" _number ${_arch})
    target_compile_options(${library} PRIVATE -gencode=arch=compute_${_number},code=lto_${_number})
    list(APPEND _codes -gencode=arch=compute_${_number},code=sm_${_number})
  endforeach()
  add_custom_command(
    OUTPUT ${output} ${report}
    COMMAND ${Python_EXECUTABLE} ${CMAKE_SOURCE_DIR}/csrc/cmake/link_report.py --step device_link --output ${output}
            --report ${report} -- ${DYNO_LINKING_NVCC} -ccbin ${CMAKE_CUDA_HOST_COMPILER} -dlink -dlto
            --split-compile-extended=0 --threads=0 --compress-mode=${GGML_CUDA_COMPRESSION_MODE} -Xcompiler=-fPIC
            ${_codes} $<TARGET_OBJECTS:${library}> -o ${output}
    DEPENDS ${library} $<TARGET_OBJECTS:${library}> ${CMAKE_SOURCE_DIR}/csrc/cmake/link_report.py
    COMMENT "Device link-time optimisation" COMMAND_EXPAND_LISTS VERBATIM)
  add_custom_target(${library}_device_link DEPENDS ${output})
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${library}> ${output})
  set_source_files_properties(${output} TARGET_DIRECTORY ${target} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  add_dependencies(${target} ${library}_device_link)
endfunction()
