/*
 * vectors.h - CUDA's vector types, with the alignment that makes a float4 one access.
 */
#ifndef OPJIT_EMULATE_VECTORS_H
#define OPJIT_EMULATE_VECTORS_H

#define EMU_VECTORS(of_, name_, align2_, align4_) \
    struct name_##1 \
    { \
        of_ x; \
    }; \
    struct alignas(align2_) name_##2 \
    { \
        of_ x, y; \
    }; \
    struct name_##3 \
    { \
        of_ x, y, z; \
    }; \
    struct alignas(align4_) name_##4 \
    { \
        of_ x, y, z, w; \
    }; \
    static inline constexpr name_##1 make_##name_##1(of_ x) \
    { \
        return {x}; \
    } \
    static inline constexpr name_##2 make_##name_##2(of_ x, of_ y) \
    { \
        return {x, y}; \
    } \
    static inline constexpr name_##3 make_##name_##3(of_ x, of_ y, of_ z) \
    { \
        return {x, y, z}; \
    } \
    static inline constexpr name_##4 make_##name_##4(of_ x, of_ y, of_ z, of_ w) \
    { \
        return {x, y, z, w}; \
    }

EMU_VECTORS(signed char, char, 2, 4)
EMU_VECTORS(unsigned char, uchar, 2, 4)
EMU_VECTORS(short, short, 4, 8)
EMU_VECTORS(unsigned short, ushort, 4, 8)
EMU_VECTORS(int, int, 8, 16)
EMU_VECTORS(unsigned, uint, 8, 16)
EMU_VECTORS(long, long, 16, 16)
EMU_VECTORS(unsigned long, ulong, 16, 16)
EMU_VECTORS(long long, longlong, 16, 16)
EMU_VECTORS(unsigned long long, ulonglong, 16, 16)
EMU_VECTORS(float, float, 8, 16)
EMU_VECTORS(double, double, 16, 16)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};

#endif
