/* NFS without a server: for LD_PRELOAD into Python, with the folder NFS_ROOT and one fault of its semantics, NFS_FAULT, in it:
 *
 *   estale  every third look-up or open finds a stale handle
 *   eio     the rename of an entry to its place is done, and its answer is lost
 *   enolck  flock has no lock service, anywhere
 *   late    an entry that another process has put in its place within the last two seconds is not there yet
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static char own[1 << 16]; /* the places to which this process has renamed something */
static int calls;

static int is_on(const char *fault, const char *path)
{
    const char *root = getenv("NFS_ROOT"), *chosen = getenv("NFS_FAULT");
    return root && chosen && strcmp(chosen, fault) == 0 && strncmp(program_invocation_short_name, "python", 6) == 0 &&
           (!path || (strncmp(path, root, strlen(root)) == 0 && !strstr(path, "/staging")));
}

static int fails(const char *path)
{
    struct stat found;
    if (is_on("estale", path) && __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) % 3 == 0)
        return errno = ESTALE;
    if (!is_on("late", path) || fstatat(AT_FDCWD, path, &found, AT_SYMLINK_NOFOLLOW) || time(NULL) - found.st_ctime > 2)
        return 0;
    for (const char *place = own; *place; place += strlen(place) + 1)
        if (strncmp(path, place, strlen(place)) == 0)
            return 0;
    return strstr(path, "/keytest.plus/") ? (errno = ENOENT) : 0;
}

static int opened(const char *name, const char *path, int flags, va_list rest)
{
    int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
    return fails(path) ? -1 : ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, name))(path, flags, mode);
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) \
    { \
        va_list rest; \
        va_start(rest, flags); \
        int found = opened(#name, path, flags, rest); \
        va_end(rest); \
        return found; \
    }
#define STAT(name, type) \
    int name(const char *path, struct type *found) \
    { \
        return fails(path) ? -1 : REAL(name)(path, found); \
    }

OPEN(open)
OPEN(open64)
STAT(stat, stat)
STAT(lstat, stat)
STAT(stat64, stat64)
STAT(lstat64, stat64)

DIR *opendir(const char *path)
{
    return fails(path) ? NULL : REAL(opendir)(path);
}

int flock(int file, int operation)
{
    if (is_on("enolck", NULL)) {
        errno = ENOLCK;
        return -1;
    }
    return ((int (*)(int, int))dlsym(RTLD_NEXT, "flock"))(file, operation);
}

int rename(const char *from, const char *to)
{
    static size_t length;
    int failed = REAL(rename)(from, to);
    if (!failed && length + strlen(to) + 2 < sizeof own)
        length += strlen(strcpy(own + length, to)) + 1;
    if (!failed && is_on("eio", to) && strstr(to, "/keytest.plus/")) {
        errno = EIO;
        return -1;
    }
    return failed;
}
