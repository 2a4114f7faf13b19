# find_package(opjit): ops in a project that is built with CMake.
#
#     find_package(opjit REQUIRED CONFIG)    # cmake -Dopjit_DIR="$(opjit --cmakedir)" ...
#     opjit_add_library(my_ops OPS scale other/op ARCHS x86-64-v3 sm_90)
#
# opjit_add_library(NAME OPS op... [ARCHS arch...]) makes the shared library NAME.so in the current
# binary directory. OPS are names of ops or their directories. Without ARCHS, the library is for the
# devices of this machine. torch.ops.load_library loads it in a process without opjit. The target
# NAME is an imported library, so a C++ program can link it:
#
#     target_link_libraries(program PRIVATE "-Wl,--no-as-needed" my_ops)
#
# The target opjit::opjit has the directory of opjit.h.

find_package(Python3 QUIET REQUIRED COMPONENTS Interpreter)
execute_process(
    COMMAND ${Python3_EXECUTABLE} -m opjit --include
    OUTPUT_VARIABLE opjit_INCLUDE_DIR
    OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE opjit_failed)
if(opjit_failed)
    set(opjit_FOUND FALSE)
    set(opjit_NOT_FOUND_MESSAGE
        "${Python3_EXECUTABLE} has no opjit; set Python3_EXECUTABLE to the Python that opjit is installed in")
    return()
endif()

if(NOT TARGET opjit::opjit)
    add_library(opjit::opjit INTERFACE IMPORTED)
    set_target_properties(opjit::opjit PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${opjit_INCLUDE_DIR}")
endif()

function(opjit_add_library name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "OPS;ARCHS")
    if(NOT arg_OPS OR arg_UNPARSED_ARGUMENTS)
        message(FATAL_ERROR "expected opjit_add_library(NAME OPS op... [ARCHS arch...])")
    endif()

    set(ops)
    set(sources)
    foreach(op IN LISTS arg_OPS)
        get_filename_component(folder "${op}" ABSOLUTE)
        if(IS_DIRECTORY "${folder}")
            file(GLOB_RECURSE found CONFIGURE_DEPENDS "${folder}/*")
            list(FILTER found EXCLUDE REGEX "/__pycache__/")
            list(APPEND sources ${found})
            set(op "${folder}")
        endif()
        list(APPEND ops "${op}")
    endforeach()

    set(work "${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/opjit/${name}")
    set(options --build-directory "${work}" --name "${name}")
    if(arg_ARCHS)
        list(JOIN arg_ARCHS "," archs)
        list(APPEND options --arch "${archs}")
    endif()

    set(library "${CMAKE_CURRENT_BINARY_DIR}/${name}.so")
    add_custom_command(
        OUTPUT "${library}"
        COMMAND ${CMAKE_COMMAND} -E rm -rf "${work}"
        COMMAND ${Python3_EXECUTABLE} -m opjit get ${ops} ${options}
        COMMAND ${CMAKE_COMMAND} -E copy "${work}/${name}.so" "${library}"
        DEPENDS ${sources}
        COMMENT "Building ${name}.so with opjit"
        VERBATIM)
    add_custom_target(${name}_build ALL DEPENDS "${library}")
    add_library(${name} SHARED IMPORTED GLOBAL)
    set_target_properties(${name} PROPERTIES IMPORTED_LOCATION "${library}" IMPORTED_NO_SONAME TRUE)
    add_dependencies(${name} ${name}_build)
endfunction()
