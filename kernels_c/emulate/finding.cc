/*
 * finding.cc - what was found, in words: `scale.cu:14: race on shared memory ...`. A place is a file's name and a line; those
 * of code are read from the library's debug information by addr2line, which comes with gcc.
 */
#include "runtime.h"

#include <algorithm>
#include <cstdarg>
#include <dlfcn.h>
#include <fcntl.h>
#include <fstream>
#include <link.h>
#include <map>
#include <mutex>
#include <set>
#include <spawn.h>
#include <sstream>
#include <sys/wait.h>
#include <unistd.h>
#include <unwind.h>

static std::recursive_mutex telling;
static std::set<std::string> known_keys;
static std::vector<std::string> findings;
static __thread cudaError_t last_error;

/* The runtime's last error is a finding's consequence, and the next call's launches do not return it. */
extern "C" void emu_forget_findings(void)
{
    const std::lock_guard<std::recursive_mutex> alone(telling);
    known_keys.clear();
    findings.clear();
    last_error = cudaSuccess;
}

bool finding_is_known(const std::string &key)
{
    const std::lock_guard<std::recursive_mutex> alone(telling);
    return known_keys.count(key) > 0;
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

/* A line of a function, or of another that it is inlined into. */
struct frame {
    std::string place;

    bool is_known() const { return place.find("??") == std::string::npos; }
    bool is_of_emulation() const { return place.find("/kernels_c/emulate/") != std::string::npos; }
    bool is_of_helper() const { return place.find("/kernels_c/opjit_") != std::string::npos; }
};

static std::string read_all(int from)
{
    char part[4096];
    std::string all;
    for (ssize_t got; (got = read(from, part, sizeof part)) > 0;)
        all.append(part, (size_t)got);
    return all;
}

/* The answer of addr2line, without a shell. */
static std::string addr2line(const char *library, size_t offset)
{
    int ends[2];
    pid_t child;
    posix_spawn_file_actions_t actions;
    char address[32];
    snprintf(address, sizeof address, "%#zx", offset);
    const char *const words[] = {"addr2line", "-i", "-e", library, address, nullptr};
    if (pipe2(ends, O_CLOEXEC))
        return "";
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    const int failed = posix_spawnp(&child, words[0], &actions, nullptr, (char *const *)words, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    const std::string answer = failed ? "" : read_all(ends[0]);
    close(ends[0]);
    if (!failed)
        waitpid(child, nullptr, 0);
    return answer;
}

/* The functions at an address that a call returns to, the innermost first: one, and those that it is inlined into. */
static const std::vector<frame> &frames_of(const void *code)
{
    static std::map<const void *, std::vector<frame>> known;
    const auto found = known.find(code);
    if (found != known.end())
        return found->second;
    std::vector<frame> &frames = known[code];
    Dl_info library, own;
    if (!dladdr(code, &library) || (dladdr((const void *)&base_of, &own) && own.dli_fbase == library.dli_fbase))
        return frames; /* none of the runtime's */
    const bool fixed = ((const ElfW(Ehdr) *)library.dli_fbase)->e_type == ET_EXEC;
    const size_t offset = (size_t)code - 1 - (fixed ? 0 : (size_t)library.dli_fbase);
    std::istringstream lines(addr2line(fixed ? "/proc/self/exe" : library.dli_fname, offset));
    for (frame each; std::getline(lines, each.place);) {
        each.place.resize(std::min(each.place.find(' '), each.place.size())); /* without a discriminator */
        if (each.is_known() && !each.is_of_emulation())
            frames.push_back(each);
    }
    return frames;
}

std::string finding_place(emu_place at)
{
    return at.file ? base_of(at.file) + ":" + std::to_string(at.line) : "?";
}

std::string finding_place(const void *code)
{
    const std::lock_guard<std::recursive_mutex> alone(telling);
    const std::vector<frame> &frames = frames_of(code);
    for (const frame &each : frames)
        if (!each.is_of_helper())
            return base_of(each.place);
    return frames.empty() ? "?" : base_of(frames[0].place);
}

/* The calls of the running thread, from the innermost. */
static std::vector<const void *> calls_of_thread(void)
{
    std::vector<const void *> calls;
    const auto add = [](_Unwind_Context *context, void *to) {
        ((std::vector<const void *> *)to)->push_back((const void *)_Unwind_GetIP(context));
        return _URC_NO_REASON;
    };
    _Unwind_Backtrace(add, &calls);
    return calls;
}

/* The function in a header of opjit that has a line, because debug information lacks the names of inlined functions. */
static std::string helper_at(const std::string &place)
{
    const size_t colon = place.rfind(':');
    std::ifstream header(place.substr(0, colon));
    std::string line, name;
    for (int left = atoi(place.c_str() + colon + 1); left > 0 && std::getline(header, line); left--) {
        const size_t end = line.find('('), first = line.find_last_of(" *", end) + 1;
        if (isalpha(line[0]) && end != std::string::npos)
            name = line.substr(first, end - first);
    }
    return name;
}

static std::string rule_of(const std::string &helper)
{
    if (helper == "opjit_block_reduce")
        return "; all threads of a block must call opjit_block_reduce, and their number must be a multiple of 32";
    if (helper == "opjit_warp_reduce")
        return "; all lanes of a warp must call opjit_warp_reduce";
    if (helper == "opjit_barrier")
        return "; all threads of a block must call OPJIT_BARRIER";
    return helper.rfind("opjit_", 0) == 0 ? "; in " + helper + "()" : "";
}

/* If the running thread is in a header of opjit: the author's line that called it, and the helper's rule. */
static void blame_author(std::string &place, std::string &rule)
{
    std::string helper;
    for (const void *code : calls_of_thread())
        for (const frame &each : frames_of(code)) {
            if (each.is_of_helper()) {
                helper = each.place;
                continue;
            }
            if (!helper.empty()) {
                place = base_of(each.place);
                rule = rule_of(helper_at(helper));
            }
            return;
        }
}

static void keep(const std::string &key, std::string place, bool is_here, const char *format, va_list values)
{
    const std::lock_guard<std::recursive_mutex> alone(telling);
    std::string rule;
    if (!known_keys.insert(key).second)
        return;
    char text[2048];
    vsnprintf(text, sizeof text, format, values);
    if (is_here && self)
        blame_author(place, rule);
    findings.push_back(place + ": " + text + rule);
}

void finding_add(const std::string &key, const std::string &place, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    keep(key, place, true, format, values);
    va_end(values);
}

void finding_add_elsewhere(const std::string &key, const std::string &place, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    keep(key, place, false, format, values);
    va_end(values);
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
