# The CMake package of Tessera: find_package(Tessera) makes Tessera::tessera.
#
# libtorch 2.11 is yours: the target `torch`, if find_package(Torch) has been
# called; else the folder TORCH_ROOT (with include/ and lib/); else that of the
# Python module torch (Python3_EXECUTABLE, or python3).
#
# The include path gets include/, where all of Tessera is in tessera/, and behind
# it the headers of Debian 12's abseil and protobuf in include/tessera/third_party.
# Where Tessera_THIRD_PARTY_HEADERS is OFF it does not get these, for a machine
# that has the same ones (libabsl-dev, libprotobuf-dev).
#
# Sets Tessera_FOUND, Tessera_VERSION, Tessera_BIN_DIR (with the program tessera).
get_filename_component(_tessera "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(Tessera_BIN_DIR "${_tessera}/bin")

set(Tessera_FOUND TRUE)
if(TARGET torch)
  set(_tessera_torch torch)
else()
  set(_tessera_torch Tessera::torch)
  set(_tessera_root "${TORCH_ROOT}")
  if(NOT _tessera_root)
    if(NOT Python3_EXECUTABLE)
      find_program(Python3_EXECUTABLE python3)
    endif()
    execute_process(
      COMMAND "${Python3_EXECUTABLE}" -c
              "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE _tessera_root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  set(_version_h "${_tessera_root}/include/torch/headeronly/version.h")
  set(_tessera_found "no libtorch")
  if(EXISTS "${_tessera_root}/lib/libtorch_cpu.so")
    set(_tessera_found "another version")
    if(EXISTS "${_version_h}")
      file(READ "${_version_h}" _version)
      if(_version MATCHES "VERSION_MAJOR ([0-9]+).*VERSION_MINOR ([0-9]+)")
        set(_tessera_found "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}")
      endif()
    endif()
  endif()
  if(NOT _tessera_found STREQUAL "2.11")
    set(Tessera_FOUND FALSE)
    set(Tessera_NOT_FOUND_MESSAGE
        "it needs libtorch 2.11, and '${_tessera_root}' has ${_tessera_found}: pip install torch==2.11.0, or set TORCH_ROOT to a folder with its include/ and lib/")
  endif()
  if(Tessera_FOUND AND NOT TARGET Tessera::torch)
    add_library(Tessera::torch INTERFACE IMPORTED)
    set_target_properties(Tessera::torch PROPERTIES
      INTERFACE_INCLUDE_DIRECTORIES
        "${_tessera_root}/include;${_tessera_root}/include/torch/csrc/api/include")
    # Kernels register themselves: no symbol of a program asks for them. Run
    # paths of the old kind, since what libtorch loads looks for CUDA's libraries
    # there, too.
    set(_torch_libraries c10 torch_cpu)
    if(EXISTS "${_tessera_root}/lib/libtorch_cuda.so")
      list(APPEND _torch_libraries c10_cuda torch_cuda)
    endif()
    file(GLOB _cuda_folders "${_tessera_root}/../nvidia/*/lib")
    set(_torch_options -Wl,--disable-new-dtags -Wl,--push-state,--no-as-needed)
    foreach(_library IN LISTS _torch_libraries)
      list(APPEND _torch_options "${_tessera_root}/lib/lib${_library}.so")
    endforeach()
    list(APPEND _torch_options -Wl,--pop-state)
    foreach(_folder IN LISTS _cuda_folders ITEMS "${_tessera_root}/lib")
      list(APPEND _torch_options "-Wl,-rpath,${_folder}" "-Wl,-rpath-link,${_folder}")
    endforeach()
    set_target_properties(Tessera::torch PROPERTIES
      INTERFACE_LINK_LIBRARIES "${_torch_options}")
  endif()
endif()

if(Tessera_FOUND AND NOT TARGET Tessera::tessera)
  # What our headers use inline lies beside the library.
  file(GLOB _beside "${_tessera}/lib/lib*.so.*")
  list(FILTER _beside EXCLUDE REGEX "libtessera")
  set(_tessera_includes "${_tessera}/include")
  if(NOT DEFINED Tessera_THIRD_PARTY_HEADERS OR Tessera_THIRD_PARTY_HEADERS)
    list(APPEND _tessera_includes "${_tessera}/include/tessera/third_party")
  endif()
  # An imported target's folders are system ones: behind those of the program,
  # and without warnings.
  add_library(Tessera::tessera SHARED IMPORTED)
  set_target_properties(Tessera::tessera PROPERTIES
    IMPORTED_LOCATION "${_tessera}/lib/libtessera.so.0"
    IMPORTED_SONAME libtessera.so.0
    INTERFACE_INCLUDE_DIRECTORIES "${_tessera_includes}"
    INTERFACE_COMPILE_FEATURES cxx_std_17
    # libtorch first: its libraries bring CUDA's, which ours look for, too.
    INTERFACE_LINK_LIBRARIES
      "${_tessera_torch};-Wl,--push-state,--as-needed;${_beside};-Wl,--pop-state;-Wl,-rpath,${_tessera}/lib")
endif()
