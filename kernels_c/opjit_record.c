/* The recorder: which files, directories and variables do the tools of a build ask for? A library for LD_PRELOAD.
 *
 * A missing path decides a build as much as a file does, so both are written down, one entry for each question, in the file that TOOL_RECORD
 * names:
 *
 *     PID <tab> KIND <tab> ERRNO <tab> SIGNATURE <tab> PATH <NUL>
 *
 *     KIND  r opened for reading        l examined, for example by stat     x a program starts
 *           w opened for writing, made, renamed or removed                  d a directory that was listed
 *           v a variable                 t the date or the time of day       p a pipe or a device, which was refused
 *           e a program that PATH has to find                               s a shared library of a program
 *
 * SIGNATURE is "device:inode:size:mtime:ctime" of a regular file, times in nanoseconds, from the open file where there is one; "dir" of a
 * directory; and empty otherwise. A recorded process ends with its parent, so no compiler outlives the program that builds.
 *
 * Plain C over libc. Every function keeps errno. Nothing is allocated, because a child of vfork may call these functions. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

enum { LONGEST = 4096 };

static int log_file = -1;
static char log_name[LONGEST];
static struct stat log_status; /* to notice that a program closed the file, and may have another one under its number */

/* A function with the name of one of libc's. The label keeps it apart from libc's declaration, which may be inline. */
#define REPLACE(result, name, ...) \
    result record_##name(__VA_ARGS__) __asm__(#name); \
    __attribute__((visibility("default"))) result record_##name(__VA_ARGS__)

/* Libc's function `name`, as `real`. */
#define REAL(result, name, ...) \
    static result (*real)(__VA_ARGS__); \
    if (!real) \
    *(void **)&real = dlsym(RTLD_NEXT, #name)

/* Open the log above the numbers that shells and drivers use. */
static void open_log(void)
{
    int file = (int)syscall(SYS_openat, AT_FDCWD, log_name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    int high = file < 0 ? -1 : fcntl(file, F_DUPFD_CLOEXEC, 200);
    if (high >= 0) {
        close(file);
        file = high;
    }
    if (file < 0 || fstat(file, &log_status))
        abort();
    log_file = file;
}

static void sign(const struct stat *status, char *signature, size_t size)
{
    signature[0] = 0;
    if (status && S_ISDIR(status->st_mode))
        snprintf(signature, size, "dir");
    else if (status && S_ISREG(status->st_mode))
        snprintf(signature, size, "%llu:%llu:%lld:%lld:%lld", (unsigned long long)status->st_dev,
                 (unsigned long long)status->st_ino, (long long)status->st_size,
                 status->st_mtim.tv_sec * 1000000000LL + status->st_mtim.tv_nsec,
                 status->st_ctim.tv_sec * 1000000000LL + status->st_ctim.tv_nsec);
}

/* Write an entry. A path that is relative starts in the directory that `directory` has open, or in the working directory; then the kind is
 * a capital letter. The signature is that of `status`, which may be NULL. */
static void write_entry(char kind, int failed, const struct stat *status, int directory, const char *path)
{
    char start[LONGEST];
    char signature[128];
    char entry[3 * LONGEST];
    struct stat now;
    if (log_file < 0 || !path)
        return;
    if (fstat(log_file, &now) || now.st_ino != log_status.st_ino || now.st_dev != log_status.st_dev)
        open_log();
    start[0] = 0;
    if (path[0] != '/' && kind != 'v' && kind != 'e') {
        char link[64];
        snprintf(link, sizeof link, directory == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", directory);
        ssize_t length = readlink(link, start, sizeof start - 2);
        start[length > 0 ? length : 0] = '/';
        start[length > 0 ? length + 1 : 1] = 0;
        if (directory == AT_FDCWD)
            kind = (char)(kind - 'a' + 'A');
    }
    sign(status, signature, sizeof signature);
    int size =
        snprintf(entry, sizeof entry, "%ld\t%c\t%d\t%s\t%s%s", (long)getpid(), kind, failed, signature, start, path);
    if (size < 0 || size >= (int)sizeof entry || write(log_file, entry, (size_t)size + 1) < 0)
        abort(); /* an incomplete record would be believed */
}

static void note(char kind, int failed, int directory, const char *path)
{
    int kept = errno;
    write_entry(kind, failed, NULL, directory, path);
    errno = kept;
}

/* Note a file that was opened, or could not be. */
static void note_opened(bool writes, int file, int directory, const char *path)
{
    int kept = errno;
    struct stat status;
    bool known = file >= 0 && !fstat(file, &status);
    write_entry(writes ? 'w' : 'r', file < 0 ? kept : 0, known ? &status : NULL, directory, path);
    errno = kept;
}

static void note_examined(bool found, const struct stat *status, int directory, const char *path)
{
    int kept = errno;
    write_entry('l', found ? 0 : kept, found ? status : NULL, directory, path);
    errno = kept;
}

/* Note a shared library of this program, which the dynamic loader opened. */
static int note_library(struct dl_phdr_info *library, size_t size, void *data)
{
    struct stat status;
    (void)size, (void)data;
    if (library->dlpi_name && library->dlpi_name[0] == '/' && !stat(library->dlpi_name, &status))
        write_entry('s', 0, &status, AT_FDCWD, library->dlpi_name);
    return 0;
}

__attribute__((constructor)) static void start(void)
{
    static char program[LONGEST];
    const char *name = getenv("TOOL_RECORD");
    if (!name)
        return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    snprintf(log_name, sizeof log_name, "%s", name);
    open_log();
    struct stat status;
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    program[length > 0 ? length : 0] = 0;
    bool known = !stat("/proc/self/exe", &status);
    write_entry('x', 0, known ? &status : NULL, AT_FDCWD, program);
    dl_iterate_phdr(note_library, NULL);
}

/* Refuse what has no end: a compiler that includes a pipe or /dev/zero would wait for ever, or fill the memory. Random numbers are for
 * programs, but not for preprocessors, which open texts with O_NOCTTY. */
static bool has_no_end(int directory, const char *path, int flags)
{
    struct stat status;
    int kept = errno;
    bool refused = false;
    bool of_process =
        path && (!strncmp(path, "/dev/fd/", 8) || !strcmp(path, "/dev/stdin") || !strncmp(path, "/proc/", 6));
    if (log_file >= 0 && path && !of_process && (flags & O_ACCMODE) == O_RDONLY &&
        !fstatat(directory, path, &status, 0)) {
        unsigned device = S_ISCHR(status.st_mode) && major(status.st_rdev) == 1 ? minor(status.st_rdev) : 0;
        bool endless = device == 5 || device == 7;                             /* zero, full */
        bool random = (device == 8 || device == 9) && (flags & O_NOCTTY) != 0; /* random, urandom */
        refused = S_ISFIFO(status.st_mode) || endless || random;
    }
    if (refused)
        write_entry('p', 0, NULL, directory, path);
    errno = refused ? EINVAL : kept;
    return refused;
}

#define OPEN(name) \
    REPLACE(int, name, const char *path, int flags, ...) \
    { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        REAL(int, name, const char *, int, ...); \
        if (has_no_end(AT_FDCWD, path, flags)) \
            return -1; \
        int file = real(path, flags, mode); \
        note_opened((flags & O_ACCMODE) != O_RDONLY, file, AT_FDCWD, path); \
        return file; \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    REPLACE(int, name, int directory, const char *path, int flags, ...) \
    { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        REAL(int, name, int, const char *, int, ...); \
        if (has_no_end(directory, path, flags)) \
            return -1; \
        int file = real(directory, path, flags, mode); \
        note_opened((flags & O_ACCMODE) != O_RDONLY, file, directory, path); \
        return file; \
    }
OPENAT(openat)
OPENAT(openat64)

/* What programs call that were compiled with _FORTIFY_SOURCE. */
#define OPEN_CHECKED(name) \
    REPLACE(int, name, const char *path, int flags) \
    { \
        REAL(int, name, const char *, int); \
        if (has_no_end(AT_FDCWD, path, flags)) \
            return -1; \
        int file = real(path, flags); \
        note_opened((flags & O_ACCMODE) != O_RDONLY, file, AT_FDCWD, path); \
        return file; \
    }
OPEN_CHECKED(__open_2)
OPEN_CHECKED(__open64_2)

#define OPENAT_CHECKED(name) \
    REPLACE(int, name, int directory, const char *path, int flags) \
    { \
        REAL(int, name, int, const char *, int); \
        if (has_no_end(directory, path, flags)) \
            return -1; \
        int file = real(directory, path, flags); \
        note_opened((flags & O_ACCMODE) != O_RDONLY, file, directory, path); \
        return file; \
    }
OPENAT_CHECKED(__openat_2)
OPENAT_CHECKED(__openat64_2)

#define CREAT(name) \
    REPLACE(int, name, const char *path, mode_t mode) \
    { \
        REAL(int, name, const char *, mode_t); \
        int file = real(path, mode); \
        note_opened(true, file, AT_FDCWD, path); \
        return file; \
    }
CREAT(creat)
CREAT(creat64)

#define FOPEN(name) \
    REPLACE(FILE *, name, const char *path, const char *mode) \
    { \
        REAL(FILE *, name, const char *, const char *); \
        bool writes = mode[0] != 'r' || strchr(mode, '+'); \
        if (has_no_end(AT_FDCWD, path, writes ? O_RDWR : O_RDONLY)) \
            return NULL; \
        FILE *file = real(path, mode); \
        note_opened(writes, file ? fileno(file) : -1, AT_FDCWD, path); \
        return file; \
    }
FOPEN(fopen)
FOPEN(fopen64)

#define FREOPEN(name) \
    REPLACE(FILE *, name, const char *path, const char *mode, FILE *stream) \
    { \
        REAL(FILE *, name, const char *, const char *, FILE *); \
        FILE *file = real(path, mode, stream); \
        note_opened(mode[0] != 'r' || strchr(mode, '+'), file ? fileno(file) : -1, AT_FDCWD, path); \
        return file; \
    }
FREOPEN(freopen)
FREOPEN(freopen64)

#define SCANDIR(name) \
    REPLACE(int, name, const char *path, struct dirent ***names, int (*filter)(const struct dirent *), \
            int (*compare)(const struct dirent **, const struct dirent **)) \
    { \
        REAL(int, name, const char *, struct dirent ***, int (*)(const struct dirent *), \
             int (*)(const struct dirent **, const struct dirent **)); \
        int count = real(path, names, filter, compare); \
        note('d', count < 0 ? errno : 0, AT_FDCWD, path); \
        return count; \
    }
SCANDIR(scandir)
SCANDIR(scandir64)

/* The C library searches PATH for these by itself. */
REPLACE(int, execvp, const char *name, char *const words[])
{
    REAL(int, execvp, const char *, char *const[]);
    if (!strchr(name, '/'))
        note('e', 0, AT_FDCWD, name);
    return real(name, words);
}

REPLACE(int, execvpe, const char *name, char *const words[], char *const variables[])
{
    REAL(int, execvpe, const char *, char *const[], char *const[]);
    if (!strchr(name, '/'))
        note('e', 0, AT_FDCWD, name);
    return real(name, words, variables);
}

REPLACE(int, posix_spawnp, pid_t *child, const char *name, const void *actions, const void *attributes,
        char *const words[], char *const variables[])
{
    REAL(int, posix_spawnp, pid_t *, const char *, const void *, const void *, char *const[], char *const[]);
    if (!strchr(name, '/'))
        note('e', 0, AT_FDCWD, name);
    return real(child, name, actions, attributes, words, variables);
}

REPLACE(DIR *, opendir, const char *path)
{
    REAL(DIR *, opendir, const char *);
    DIR *found = real(path);
    note('d', found ? 0 : errno, AT_FDCWD, path);
    return found;
}

#define STAT(name) \
    REPLACE(int, name, const char *path, struct stat *status) \
    { \
        REAL(int, name, const char *, struct stat *); \
        int result = real(path, status); \
        note_examined(!result, status, AT_FDCWD, path); \
        return result; \
    }
STAT(stat)
STAT(stat64)
STAT(lstat)
STAT(lstat64)

/* What programs call that were compiled for a glibc before 2.33. */
#define XSTAT(name) \
    REPLACE(int, name, int version, const char *path, struct stat *status) \
    { \
        REAL(int, name, int, const char *, struct stat *); \
        int result = real(version, path, status); \
        note_examined(!result, status, AT_FDCWD, path); \
        return result; \
    }
XSTAT(__xstat)
XSTAT(__xstat64)
XSTAT(__lxstat)
XSTAT(__lxstat64)

#define FSTATAT(name) \
    REPLACE(int, name, int directory, const char *path, struct stat *status, int flags) \
    { \
        REAL(int, name, int, const char *, struct stat *, int); \
        int result = real(directory, path, status, flags); \
        if (path[0]) \
            note_examined(!result, status, directory, path); \
        return result; \
    }
FSTATAT(fstatat)
FSTATAT(fstatat64)

REPLACE(int, statx, int directory, const char *path, int flags, unsigned mask, void *status)
{
    REAL(int, statx, int, const char *, int, unsigned, void *);
    int result = real(directory, path, flags, mask, status);
    if (path && path[0])
        note_examined(!result, NULL, directory, path);
    return result;
}

#define ACCESS(name) \
    REPLACE(int, name, const char *path, int mode) \
    { \
        REAL(int, name, const char *, int); \
        int result = real(path, mode); \
        note_examined(!result, NULL, AT_FDCWD, path); \
        return result; \
    }
ACCESS(access)
ACCESS(eaccess)
ACCESS(euidaccess)

REPLACE(int, faccessat, int directory, const char *path, int mode, int flags)
{
    REAL(int, faccessat, int, const char *, int, int);
    int result = real(directory, path, mode, flags);
    note_examined(!result, NULL, directory, path);
    return result;
}

#define CHANGE(name) \
    REPLACE(int, name, const char *from, const char *to) \
    { \
        REAL(int, name, const char *, const char *); \
        int result = real(from, to); \
        note('w', result ? errno : 0, AT_FDCWD, to); \
        return result; \
    }
CHANGE(rename)
CHANGE(link)
CHANGE(symlink)

REPLACE(int, renameat, int from, const char *old, int to, const char *path)
{
    REAL(int, renameat, int from, const char *old, int to, const char *path);
    int result = real(from, old, to, path);
    note('w', result ? errno : 0, to, path);
    return result;
}

REPLACE(int, renameat2, int from, const char *old, int to, const char *path, unsigned flags)
{
    REAL(int, renameat2, int from, const char *old, int to, const char *path, unsigned flags);
    int result = real(from, old, to, path, flags);
    note('w', result ? errno : 0, to, path);
    return result;
}

REPLACE(int, utimensat, int directory, const char *path, const struct timespec times[2], int flags)
{
    REAL(int, utimensat, int directory, const char *path, const struct timespec times[2], int flags);
    int result = real(directory, path, times, flags);
    note('w', result ? errno : 0, directory, path);
    return result;
}

REPLACE(int, unlinkat, int directory, const char *path, int flags)
{
    REAL(int, unlinkat, int directory, const char *path, int flags);
    int result = real(directory, path, flags);
    note('w', result ? errno : 0, directory, path);
    return result;
}

REPLACE(int, mkdir, const char *path, mode_t mode)
{
    REAL(int, mkdir, const char *, mode_t);
    int result = real(path, mode);
    note('w', result ? errno : 0, AT_FDCWD, path);
    return result;
}

REPLACE(int, unlink, const char *path)
{
    REAL(int, unlink, const char *);
    int result = real(path);
    note('w', result ? errno : 0, AT_FDCWD, path);
    return result;
}

REPLACE(int, mkstemp, char *path)
{
    REAL(int, mkstemp, char *);
    int file = real(path);
    note_opened(true, file, AT_FDCWD, path);
    return file;
}

REPLACE(int, mkstemps, char *path, int end)
{
    REAL(int, mkstemps, char *, int);
    int file = real(path, end);
    note_opened(true, file, AT_FDCWD, path);
    return file;
}

#define VARIABLE(name) \
    REPLACE(char *, name, const char *variable) \
    { \
        REAL(char *, name, const char *); \
        note('v', 0, AT_FDCWD, variable); \
        return real(variable); \
    }
VARIABLE(getenv)
VARIABLE(secure_getenv)

/* Preprocessors ask for the local time where a text uses __DATE__, __TIME__ or __TIMESTAMP__. */
REPLACE(struct tm *, localtime, const time_t *when)
{
    REAL(struct tm *, localtime, const time_t *);
    note('t', 0, AT_FDCWD, "/");
    return real(when);
}

REPLACE(struct tm *, localtime_r, const time_t *when, struct tm *result)
{
    REAL(struct tm *, localtime_r, const time_t *, struct tm *);
    note('t', 0, AT_FDCWD, "/");
    return real(when, result);
}
