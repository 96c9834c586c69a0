//go:build !race

#include "textflag.h"

// DI, SI: the piece; R8, R9: the steps; R10: pieces left; R11: width. All of it needs
// AVX2.

// Where the width is no multiple of 32, the last 32 bytes are copied over some that
// were copied before. CX: how far we are; R12: where the last 32 bytes begin; DX: up to
// where there are 128 more.
//
// func copyWide(dst, src unsafe.Pointer, n, dstStep, srcStep, width int)
TEXT ·copyWide(SB), NOSPLIT, $0-48
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), R10
	MOVQ dstStep+24(FP), R8
	MOVQ srcStep+32(FP), R9
	MOVQ width+40(FP), R11
	TESTQ R10, R10
	JLE  done
	LEAQ -32(R11), R12
	LEAQ -128(R11), DX

piece:
	XORQ CX, CX
	TESTQ DX, DX
	JL   rest

more:
	VMOVDQU (SI)(CX*1), Y0
	VMOVDQU 32(SI)(CX*1), Y1
	VMOVDQU 64(SI)(CX*1), Y2
	VMOVDQU 96(SI)(CX*1), Y3
	VMOVDQU Y0, (DI)(CX*1)
	VMOVDQU Y1, 32(DI)(CX*1)
	VMOVDQU Y2, 64(DI)(CX*1)
	VMOVDQU Y3, 96(DI)(CX*1)
	ADDQ $128, CX
	CMPQ CX, DX
	JLE  more

rest:
	CMPQ CX, R12
	JG   last
	VMOVDQU (SI)(CX*1), Y0
	VMOVDQU Y0, (DI)(CX*1)
	ADDQ $32, CX
	JMP  rest

last:
	CMPQ CX, R11
	JE   next
	VMOVDQU (SI)(R12*1), Y0
	VMOVDQU Y0, (DI)(R12*1)

next:
	ADDQ R8, DI
	ADDQ R9, SI
	DECQ R10
	JNZ  piece
	VZEROUPPER

done:
	RET

// Lines are written past the cache whole: part of one costs as much as all of it, and
// an ordinary write fetches it first. The end of a piece whose line goes on in another
// piece waits in carry (R12, step R13) until that one comes; DX is the place in the
// line. Ends that nobody joins are written in the ordinary way. Everything is a
// multiple of 16 bytes, and DI is aligned to 16.
//
// func streamRows(dst, src unsafe.Pointer, n, dstStep, srcStep, width int, carry unsafe.Pointer, carryStep int, join, keep bool)
TEXT ·streamRows(SB), NOSPLIT, $0-66
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), R10
	MOVQ dstStep+24(FP), R8
	MOVQ srcStep+32(FP), R9
	MOVQ width+40(FP), R11
	MOVQ carry+48(FP), R12
	MOVQ carryStep+56(FP), R13
	MOVBLZX join+64(FP), R14
	MOVBLZX keep+65(FP), R15
	TESTQ R10, R10
	JLE  done

piece:
	MOVQ R11, CX
	MOVQ DI, AX
	MOVQ SI, BX
	MOVQ AX, DX
	ANDQ $63, DX
	JZ   whole
	TESTQ R14, R14
	JZ   head

join:
	VMOVDQU (BX), X0
	VMOVDQU X0, (R12)(DX*1)
	ADDQ $16, BX
	SUBQ $16, CX
	ADDQ $16, DX
	CMPQ DX, $64
	JNE  join
	ANDQ $~63, AX
	VMOVDQU (R12), Y0
	VMOVDQU 32(R12), Y1
	VMOVNTDQ Y0, (AX)
	VMOVNTDQ Y1, 32(AX)
	ADDQ $64, AX
	JMP  whole

head:
	VMOVDQU (BX), X0
	VMOVDQU X0, (AX)
	ADDQ $16, AX
	ADDQ $16, BX
	SUBQ $16, CX
	TESTQ $63, AX
	JNZ  head

whole:
	SUBQ $64, CX
	JL   rest

line:
	PREFETCHT0 512(BX)
	VMOVDQU (BX), Y0
	VMOVDQU 32(BX), Y1
	VMOVNTDQ Y0, (AX)
	VMOVNTDQ Y1, 32(AX)
	ADDQ $64, AX
	ADDQ $64, BX
	SUBQ $64, CX
	JGE  line

rest:
	ADDQ $64, CX
	JZ   next
	TESTQ R15, R15
	JZ   tail
	MOVQ R12, AX

tail:
	VMOVDQU (BX), X0
	VMOVDQU X0, (AX)
	ADDQ $16, AX
	ADDQ $16, BX
	SUBQ $16, CX
	JNZ  tail

next:
	ADDQ R8, DI
	ADDQ R9, SI
	ADDQ R13, R12
	DECQ R10
	JNZ  piece
	VZEROUPPER

done:
	RET

// func prefetch(p unsafe.Pointer, lines int)
TEXT ·prefetch(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), AX
	MOVQ lines+8(FP), CX

more:
	PREFETCHT0 (AX)
	ADDQ $64, AX
	DECQ CX
	JG   more
	RET

// func fence()
TEXT ·fence(SB), NOSPLIT, $0-0
	SFENCE
	RET
