"""Published test vectors, for Python and for browsers."""

ALICE = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
BOB_PUBLIC = bytes.fromhex("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
SHARED = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
"""RFC 7748, section 6.1."""
KNOWN_SECRETS = [
    bytes(32),
    bytes([1, *bytes(31)]),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
]
"""Keys of small order. They make every X25519 secret 0: RFC 7748, section 6.1, and cr.yp.to/ecdh.html."""
AES_KEY = bytes([0x80, *bytes(31)])
AES_OF_ZERO = bytes.fromhex("e35a6dcb19b201a01ebcfa8aa22b5759")
"""NIST's AESAVS, variable key, 256 bits, count 0: the first block of the counter mode from 0."""
ED25519 = {
    "private": bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"),
    "public": bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"),
    "signature of 72": bytes.fromhex(
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    ),
}
"""RFC 8032, section 7.1, test 2: the message is the byte 72 (hexadecimal), the letter r."""
