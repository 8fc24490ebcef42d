"""Bytes to checked pixels."""

import io
import struct
import zlib

import numpy as np
import PIL.Image
import pytest

from foreglance import Message, RequestError
from foreglance.images import each_picture, open_picture, open_pictures

LIMIT = 1_000_000


def encoded(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def refused(source, limit=LIMIT):
    with pytest.raises(RequestError) as error:
        open_picture(source, limit)
    assert error.value.param == "image"
    return error.value.code, str(error.value)


RED = PIL.Image.new("RGB", (4, 3), (255, 0, 0))


@pytest.mark.parametrize(
    "source",
    (b"", b"no picture at all", encoded(RED)[:40], encoded(PIL.Image.effect_noise((64, 64), 9), "JPEG")[:300]),
    ids=("empty", "text", "cut png", "cut jpeg"),
)
def test_a_broken_picture_is_refused_in_words(source, tmp_path):
    path = tmp_path / "broken.png"
    path.write_bytes(source)
    for given in (source, path, str(path)):
        code, message = refused(given)
        assert code == "image_broken" and "picture" in message
    assert "broken.png" in message


def test_a_missing_file_is_refused_by_name(tmp_path):
    code, message = refused(tmp_path / "nowhere.png")
    assert code == "image_not_found" and "nowhere.png" in message


def test_a_picture_above_the_limit_is_refused():
    assert refused(RED, 11) == ("image_too_large", "image has 4x3 pixels, above the limit of 11; scale it down")
    assert open_picture(RED, 12).pixels.size == (4, 3)


def bomb(side):
    """A PNG whose header promises side x side pixels and whose data is nothing."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", (10_000, 60_000))
def test_a_decompression_bomb_is_refused_from_its_header(side, monkeypatch):
    """Its pixels are never made; also where the image library itself refuses it (it once was called broken)."""
    monkeypatch.setattr(PIL.Image.Image, "convert", lambda *a, **k: pytest.fail("it was decoded"))
    code, message = refused(bomb(side), 64_000_000)
    assert code == "image_too_large" and "scale it down" in message


def test_transparency_is_seen_over_white():
    clear = PIL.Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    half = PIL.Image.new("RGBA", (2, 2), (0, 0, 0, 128))
    palette = PIL.Image.new("P", (2, 2))
    palette.putpalette([0, 0, 255] + [0] * 765)
    see_through = encoded(palette, "PNG", transparency=0)
    for source, want in ((clear, 255), (half, 127), (PIL.Image.new("LA", (2, 2), (0, 0)), 255), (see_through, 255)):
        pixels = open_picture(source, LIMIT).pixels
        assert pixels.mode == "RGB"
        assert (np.asarray(pixels) == want).all()


@pytest.mark.parametrize("mode", ("1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "I;16", "I", "F", "HSV", "YCbCr", "LAB"))
def test_every_mode_becomes_rgb(mode):
    pixels = open_picture(PIL.Image.new(mode, (5, 2)), LIMIT).pixels
    assert (pixels.mode, pixels.size) == ("RGB", (5, 2))


def test_sixteen_bits_of_grey_are_scaled_not_cut():
    """PIL cuts what is above 255, so a scan of 16 bits would be all white."""
    deep = PIL.Image.fromarray(np.arange(0, 65536, 257, dtype=np.uint16).reshape(1, 256))
    for source in (deep, encoded(deep, "PNG")):
        assert np.asarray(open_picture(source, LIMIT).pixels)[0].tolist() == [[value] * 3 for value in range(256)]


def test_a_palette_keeps_its_colours():
    palette = PIL.Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30] + [0] * 765)
    assert np.asarray(open_picture(encoded(palette), LIMIT).pixels).tolist() == [[[10, 20, 30]] * 2]


def test_a_single_pixel_is_a_picture():
    """Case A11."""
    assert np.asarray(open_picture(PIL.Image.new("RGB", (1, 1), "red"), LIMIT).pixels).tolist() == [[[255, 0, 0]]]


def test_the_first_frame_of_an_animation_is_taken():
    frames = [PIL.Image.new("RGB", (2, 2), colour) for colour in ("red", "blue")]
    source = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.asarray(open_picture(source, LIMIT).pixels)[0, 0].tolist() == [255, 0, 0]


def test_the_identity_of_a_picture_is_its_pixels(tmp_path):
    path = tmp_path / "a.bmp"
    RED.save(path)
    digests = {open_picture(source, LIMIT).digest for source in (RED, encoded(RED), path, RED.convert("RGBA"))}
    assert len(digests) == 1
    for other in (RED.transpose(PIL.Image.Transpose.ROTATE_90), PIL.Image.new("RGB", (4, 3), (254, 0, 0))):
        assert open_picture(other, LIMIT).digest not in digests


def test_what_is_no_picture_by_type_is_refused():
    with pytest.raises(RequestError, match="a path, bytes or a PIL image, got int"):
        open_picture(3, LIMIT)


def test_all_pictures_of_a_conversation_come_in_order_and_within_their_number():
    blue = PIL.Image.new("RGB", (1, 1), "blue")
    messages = [Message.of("user", "a", [RED, blue]), Message.of("assistant", "b"), Message.of("user", "c", [RED])]
    assert [p.pixels.size for p in open_pictures(messages, 3, LIMIT)] == [(4, 3), (1, 1), (4, 3)]
    with pytest.raises(RequestError) as error:
        open_pictures(messages, 2, LIMIT)
    assert error.value.code == "too_many_images" and "3 images, the limit is 2" in str(error.value)


def test_a_photo_is_turned_as_its_exif_data_says():
    """Phones store photos lying on their side, with a note on how to hold them."""
    lying = PIL.Image.new("RGB", (4, 2), "red")
    lying.putpixel((0, 0), (0, 0, 255))
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    stream = io.BytesIO()
    lying.save(stream, "PNG", exif=exif)
    upright = open_picture(stream.getvalue(), 100).pixels
    assert upright.size == (2, 4)
    assert upright.getpixel((1, 0)) == (0, 0, 255)


def test_pictures_are_decoded_one_by_one_and_the_bad_one_is_named():
    messages = [Message.of("user", "?", [RED, b"no picture", encoded(RED)])]
    pictures = each_picture(messages, 3, LIMIT)
    assert next(pictures).pixels.size == (4, 3)
    with pytest.raises(RequestError, match="image 2 of 3 is no picture of a known kind"):
        next(pictures)


def test_formats_beyond_those_that_are_named_are_not_tried():
    """PostScript would be handed to another program."""
    with pytest.raises(RequestError, match="no picture of a known kind"):
        open_picture(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", LIMIT)
