/*
 * finding.cc - what was found, in words: `scale.cu:14: race on shared memory ...`. A place is a file's name and a line; those
 * of code are read from the library's debug information by addr2line, which comes with gcc.
 */
#include "runtime.h"

#include <cstdarg>
#include <dlfcn.h>
#include <link.h>
#include <map>
#include <mutex>
#include <set>

static std::recursive_mutex telling;
static std::set<std::string> known_keys;
static std::vector<std::string> findings;

extern "C" void emu_forget_findings(void)
{
    const std::lock_guard<std::recursive_mutex> alone(telling);
    known_keys.clear();
    findings.clear();
}

bool finding_is_known(const std::string &key)
{
    const std::lock_guard<std::recursive_mutex> alone(telling);
    return known_keys.count(key) > 0;
}

void finding_add(const std::string &key, const std::string &place, const char *format, ...)
{
    const std::lock_guard<std::recursive_mutex> alone(telling);
    if (!known_keys.insert(key).second)
        return;
    char text[2048];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    findings.push_back(place + ": " + text);
}

extern "C" {
/* A race, if there is one: it may be the reason of a read of unwritten memory, which is found earlier. */
const char *emu_first_finding(void)
{
    for (const std::string &each : findings)
        if (each.find(": race on ") != std::string::npos)
            return each.c_str();
    return findings.empty() ? nullptr : findings[0].c_str();
}

int emu_count_findings(void)
{
    return (int)findings.size();
}

const char *emu_finding(int number)
{
    return findings[(size_t)number].c_str();
}
}

/* ---------------------------------------------------------------------------------------------- */
/* Places                                                                                         */

static std::string base_of(const std::string &path)
{
    return path.substr(path.rfind('/') + 1);
}

std::string finding_place(emu_place at)
{
    return at.file ? base_of(at.file) + ":" + std::to_string(at.line) : "?";
}

/* The innermost of the author's places in addr2line's answer: a line for each inlined function. */
static std::string author_place(FILE *answer)
{
    char line[4096];
    std::string found = "?";
    while (fgets(line, sizeof line, answer)) {
        line[strcspn(line, " \n")] = 0;
        const std::string place = line;
        if (place.find("/kernels_c/emulate/") == std::string::npos && place.find("??") == std::string::npos &&
            found == "?")
            found = base_of(place);
    }
    return found;
}

std::string finding_place(const void *code)
{
    static std::map<const void *, std::string> places;
    const std::lock_guard<std::recursive_mutex> alone(telling);
    std::string &place = places[code];
    if (!place.empty())
        return place;
    place = "?";
    Dl_info library;
    if (!dladdr(code, &library))
        return place;
    const bool fixed = ((const ElfW(Ehdr) *)library.dli_fbase)->e_type == ET_EXEC;
    const size_t offset = (size_t)code - 1 - (fixed ? 0 : (size_t)library.dli_fbase);
    char command[4096];
    snprintf(command, sizeof command, "addr2line -i -e '%s' %#zx", fixed ? "/proc/self/exe" : library.dli_fname,
             offset);
    FILE *answer = popen(command, "r");
    if (answer) {
        place = author_place(answer);
        pclose(answer);
    }
    return place;
}

std::string finding_line(const std::string &place, const std::string &from)
{
    const size_t colon = place.rfind(':');
    const bool same_file = colon != std::string::npos && place.compare(0, colon, from, 0, from.rfind(':')) == 0;
    return same_file ? "line " + place.substr(colon + 1) : place;
}

/* ---------------------------------------------------------------------------------------------- */
/* Barriers and atomics that checked threads have reached                                         */

static std::set<std::pair<const char *, int>> barriers_reached;
static std::set<const void *> atomics_reached;

void finding_reached(emu_place at)
{
    barriers_reached.insert({at.file, at.line});
}

void finding_reached(const void *code)
{
    atomics_reached.insert(code);
}

/* Their places, one in each line. The text is valid until the next call. */
extern "C" const char *emu_reached(void)
{
    static std::string text;
    text.clear();
    for (const auto &[file, line] : barriers_reached)
        text += finding_place(emu_place{file, line}) + "\n";
    for (const void *code : atomics_reached)
        text += finding_place(code) + "\n";
    return text.c_str();
}

/* ---------------------------------------------------------------------------------------------- */
/* Threads                                                                                        */

static std::string numbered(const char *what, dim3 size, uint3 index)
{
    char text[100];
    if (size.y * size.z == 1)
        snprintf(text, sizeof text, "%s %u", what, index.x);
    else
        snprintf(text, sizeof text, "%s (%u,%u,%u)", what, index.x, index.y, index.z);
    return text;
}

static uint3 index_in(dim3 size, unsigned number)
{
    return {number % size.x, number / size.x % size.y, number / size.x / size.y};
}

/* A thread by the number of its block among all launches that run. */
std::string finding_thread(uint32_t block, int thread)
{
    for (const named_launch &of : named) {
        if (block - of.first >= (unsigned long)of.blocks)
            continue;
        const std::string rank = of.rank >= 0 ? "rank " + std::to_string(of.rank) + " " : "";
        return rank + numbered("block", of.grid, index_in(of.grid, block - of.first)) + " " +
               numbered("thread", of.block, index_in(of.block, (unsigned)thread));
    }
    return "a thread";
}

std::string finding_thread(const thread *who)
{
    return finding_thread(who->in->number, who->number);
}

/* ---------------------------------------------------------------------------------------------- */
/* Errors of the CUDA runtime                                                                     */

static __thread cudaError_t last_error;

cudaError_t emu_last_error(bool clear)
{
    const cudaError_t error = last_error;
    if (clear)
        last_error = cudaSuccess;
    return error;
}

cudaError_t emu_fail(cudaError_t error)
{
    return last_error = in_call && !findings.empty() ? cudaSuccess : error;
}

const char *emu_error_name(cudaError_t error)
{
    switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDeviceFunction: return "cudaErrorInvalidDeviceFunction";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorLaunchOutOfResources: return "cudaErrorLaunchOutOfResources";
    case cudaErrorAssert: return "cudaErrorAssert";
    case cudaErrorMisalignedAddress: return "cudaErrorMisalignedAddress";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorCooperativeLaunchTooLarge: return "cudaErrorCooperativeLaunchTooLarge";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    }
    return "cudaErrorUnknown";
}

const char *emu_error_text(cudaError_t error)
{
    const char *found = error == cudaSuccess ? nullptr : emu_first_finding();
    return found ? found : emu_error_name(error);
}
