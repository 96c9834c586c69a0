//go:build !race

#include "textflag.h"

// DI, SI: the piece; R8, R9: the steps; R10: pieces left; R11: width.
// AX, BX, CX: where in the piece, and how much of it is left.

// func copyShort(dst, src unsafe.Pointer, n, dstStep, srcStep, width int)
TEXT ·copyShort(SB), NOSPLIT, $0-48
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), R10
	MOVQ dstStep+24(FP), R8
	MOVQ srcStep+32(FP), R9
	MOVQ width+40(FP), R11
	TESTQ R10, R10
	JLE  done

piece:
	MOVQ R11, CX
	MOVQ DI, AX
	MOVQ SI, BX
	TESTQ $16, CX
	JZ   pairs
	MOVOU (BX), X0
	MOVOU X0, (AX)
	ADDQ $16, AX
	ADDQ $16, BX
	SUBQ $16, CX
	JZ   next

pairs:
	MOVOU (BX), X0
	MOVOU 16(BX), X1
	MOVOU X0, (AX)
	MOVOU X1, 16(AX)
	ADDQ $32, AX
	ADDQ $32, BX
	SUBQ $32, CX
	JNZ  pairs

next:
	ADDQ R8, DI
	ADDQ R9, SI
	DECQ R10
	JNZ  piece

done:
	RET

// The ends of a piece lie in lines that it shares with its neighbours: these are
// written in the ordinary way, because part of a line past the cache costs a whole
// one. Everything is a multiple of 16 bytes, and DI is aligned to 16.
//
// func streamRows(dst, src unsafe.Pointer, n, dstStep, srcStep, width int)
TEXT ·streamRows(SB), NOSPLIT, $0-48
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), R10
	MOVQ dstStep+24(FP), R8
	MOVQ srcStep+32(FP), R9
	MOVQ width+40(FP), R11
	TESTQ R10, R10
	JLE  done

piece:
	MOVQ R11, CX
	MOVQ DI, AX
	MOVQ SI, BX

head:
	TESTQ $63, AX
	JZ   whole
	TESTQ CX, CX
	JZ   next
	MOVOU (BX), X0
	MOVO  X0, (AX)
	ADDQ $16, AX
	ADDQ $16, BX
	SUBQ $16, CX
	JMP  head

whole:
	SUBQ $64, CX
	JL   rest

line:
	PREFETCHT0 512(BX)
	MOVOU (BX), X0
	MOVOU 16(BX), X1
	MOVOU 32(BX), X2
	MOVOU 48(BX), X3
	MOVNTO X0, (AX)
	MOVNTO X1, 16(AX)
	MOVNTO X2, 32(AX)
	MOVNTO X3, 48(AX)
	ADDQ $64, AX
	ADDQ $64, BX
	SUBQ $64, CX
	JGE  line

rest:
	ADDQ $64, CX
	JZ   next

tail:
	MOVOU (BX), X0
	MOVO  X0, (AX)
	ADDQ $16, AX
	ADDQ $16, BX
	SUBQ $16, CX
	JNZ  tail

next:
	ADDQ R8, DI
	ADDQ R9, SI
	DECQ R10
	JNZ  piece

done:
	RET

// func fence()
TEXT ·fence(SB), NOSPLIT, $0-0
	SFENCE
	RET
