"""Numbers of Linux's system calls on x86-64 and on arm64, by purpose. A dash means that arm64 lacks the call.

They are from asm/unistd_64.h and asm-generic/unistd.h of Linux 6.12. sandbox.py turns them into filters.
"""

import platform

# Calls of a kernel that runs: memory, time, the streams and sockets that are open.
COMPUTING = """
read 0 63, write 1 64, close 3 57, fstat 5 80, lseek 8 62, munmap 11 215, brk 12 214,
rt_sigprocmask 14 135, rt_sigreturn 15 139, pread64 17 67, pwrite64 18 68, writev 20 66,
sched_yield 24 124, mremap 25 216, madvise 28 233, getpid 39 172, sendmsg 46 211, recvmsg 47 212,
exit 60 93, ftruncate 77 46, gettimeofday 96 169, sigaltstack 131 132, gettid 186 178,
futex 202 98, sched_getaffinity 204 123, restart_syscall 219 128, clock_gettime 228 113,
exit_group 231 94, set_robust_list 273 99, getrandom 318 278, memfd_create 319 279,
membarrier 324 283, rseq 334 293, poll 7 -, ppoll 271 73, getrusage 98 165, newfstatat 262 79,
clock_nanosleep 230 115
"""

# Calls that open and read files and describe the process, for the dynamic loader and Python's imports.
LOADING = """
open 2 -, openat 257 56, readlink 89 -, readlinkat 267 78, access 21 -, faccessat 269 48,
faccessat2 439 439, stat 4 -, lstat 6 -, statx 332 291, getcwd 79 17, getdents64 217 61,
uname 63 160, sysinfo 99 179, dup 32 23, mincore 27 232, getuid 102 174, geteuid 107 175,
getgid 104 176, getegid 108 177, time 201 -, times 100 153, clock_getres 229 114,
sched_getparam 143 121, sched_getscheduler 145 120, getcpu 309 168, arch_prctl 158 -,
statfs 137 43, fstatfs 138 44, readv 19 65, preadv 295 69, seccomp 317 277
"""

# Calls that compilers, Python's standard library and CUDA's driver need in addition.
PROGRAMS = """
alarm 37 -, capget 125 90, chdir 80 49, fchdir 81 50, close_range 436 436,
copy_file_range 326 285, creat 85 -, dup2 33 -, dup3 292 24, epoll_create 213 -,
epoll_create1 291 20, epoll_ctl 233 21, epoll_pwait 281 22, epoll_pwait2 441 441,
epoll_wait 232 -, eventfd 284 -, eventfd2 290 19, execve 59 221, execveat 322 281,
fadvise64 221 223, fallocate 285 47, fdatasync 75 83, flock 73 32, fork 57 -, fsync 74 82,
get_mempolicy 239 236, get_robust_list 274 100, getdents 78 -, getgroups 115 158,
getitimer 36 102, getpeername 52 205, getpgid 121 155, getpgrp 111 -, getpriority 140 141,
getppid 110 173, getresgid 120 150, getresuid 118 148, getrlimit 97 163, getsid 124 156,
getsockname 51 204, getsockopt 55 209, getxattr 191 8, fgetxattr 193 10, lgetxattr 192 9,
listxattr 194 11, flistxattr 196 13, llistxattr 195 12, inotify_init1 294 26,
inotify_add_watch 254 27, inotify_rm_watch 255 28, ioctl 16 29, kill 62 129, link 86 -,
linkat 265 37, mbind 237 235, mkdir 83 -, mkdirat 258 34, mlock 149 228, mlock2 325 284,
munlock 150 229, mlockall 151 230, munlockall 152 231, msync 26 227, nanosleep 35 101,
openat2 437 437, pause 34 -, pidfd_open 434 434, pipe 22 -, pipe2 293 59, pkey_alloc 330 289,
pkey_free 331 290, pkey_mprotect 329 288, preadv2 327 286, pselect6 270 72,
pwritev 296 70, pwritev2 328 287, readahead 187 213, recvfrom 45 207, recvmmsg 299 243,
rename 82 -, renameat 264 38, renameat2 316 276, rmdir 84 -, rt_sigpending 127 136,
rt_sigsuspend 130 133, rt_sigtimedwait 128 137, sched_get_priority_max 146 125,
sched_get_priority_min 147 126, sched_getattr 315 275, sched_setaffinity 203 122, select 23 -,
sendfile 40 71, sendmmsg 307 269, sendto 44 206, set_mempolicy 238 237, set_tid_address 218 96,
setitimer 38 103, setpgid 109 154, setrlimit 160 164, setsid 112 157, setsockopt 54 208,
shutdown 48 210, signalfd 282 -, signalfd4 289 74, splice 275 76, symlink 88 -, symlinkat 266 36,
sync_file_range 277 84, tee 276 77, timerfd_create 283 85,
timerfd_gettime 287 87, timerfd_settime 286 86, truncate 76 45, umask 95 166, unlink 87 -,
unlinkat 263 35, vfork 58 -, vmsplice 278 75, wait4 61 260, waitid 247 95
"""

# Calls that leave the worker's group of processes, which its keeper stops as a whole.
LEAVING = "setpgid 109 154, setsid 112 157"

# Calls that change a file's mode, owner, times or attributes. Landlock cannot refuse them.
IGNORED = """
chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55,
lchown 94 -, fchownat 260 54, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88,
setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15,
fremovexattr 199 16
"""

# Calls that sandbox.py allows for some arguments.
CONDITIONAL = """
mmap 9 222, mprotect 10 226, tgkill 234 131, rt_sigaction 13 134, fcntl 72 25, clone 56 220,
socketpair 53 199, prlimit64 302 261,
prctl 157 167, utimensat 280 88
"""


def numbers(table: str) -> dict[str, int]:
    """Return the numbers of a table's calls on this machine, by name."""
    column = 2 if platform.machine() == "aarch64" else 1
    rows = (row.split() for row in table.replace("\n", " ").split(","))
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}
