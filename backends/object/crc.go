package object

// JoinCRC is the CRC of the bytes of all parts behind each other, from theirs; the zero Sum
// when a part has none by this algorithm. The polynomial is that of the CRC, reflected: its
// highest bit is the coefficient of x⁰.
func JoinCRC[W uint32 | uint64](parts []Part, a Algorithm, polynomial W) Sum {
	var all W
	for _, p := range parts {
		if p.Sum.Algorithm != a {
			return Sum{}
		}
		// Bytes behind others multiply the remainder of those by x to the number of bits.
		all = multiply(all, power(p.Bytes, polynomial), polynomial) ^ W(p.Sum.Value)
	}
	return Sum{Algorithm: a, Value: uint64(all)}
}

// multiply is the product of two polynomials modulo that of a CRC.
func multiply[W uint32 | uint64](a, b, polynomial W) W {
	var product W
	for m := one[W](); m != 0; m >>= 1 {
		if a&m != 0 {
			product ^= b
		}
		carry := b & 1
		b >>= 1
		if carry != 0 {
			b ^= polynomial
		}
	}
	return product
}

// power is x to the number of bits of n bytes, modulo the polynomial of a CRC.
func power[W uint32 | uint64](n int64, polynomial W) W {
	product, square := one[W](), one[W]()>>8 // x⁰, x⁸
	for ; n > 0; n >>= 1 {
		if n&1 != 0 {
			product = multiply(product, square, polynomial)
		}
		square = multiply(square, square, polynomial)
	}
	return product
}

// one is x⁰.
func one[W uint32 | uint64]() W { return ^(^W(0) >> 1) }
